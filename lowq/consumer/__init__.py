"""Jobs out by hand: a broker and the caller's own code.

consumer        its life: shards, session, end
takes           how it takes jobs and hands them over
hand            what was taken and not reported, and its reports
async_consumer  the same, awaitable
"""

from lowq.consumer.async_consumer import AsyncConsumer, AsyncConsumerJob
from lowq.consumer.consumer import Consumer, check_consumer
from lowq.job import ConsumerJob

__all__ = ["AsyncConsumer", "AsyncConsumerJob", "Consumer", "ConsumerJob", "check_consumer"]
