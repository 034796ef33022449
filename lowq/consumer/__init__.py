"""Jobs out by hand: a broker and the caller's own code.

consumer        its life: shards, session, end
takes           how it takes jobs and hands them over
reports         what becomes of them: reported, or released
in_hand         what was taken and not reported
async_consumer  the same, awaitable
job             a job as the caller gets it
"""

from lowq.consumer.async_consumer import AsyncConsumer, AsyncConsumerJob
from lowq.consumer.consumer import Consumer, check_consumer
from lowq.consumer.job import ConsumerJob

__all__ = ["AsyncConsumer", "AsyncConsumerJob", "Consumer", "ConsumerJob", "check_consumer"]
