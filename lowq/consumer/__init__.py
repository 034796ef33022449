"""Jobs out by hand: a broker and the caller's own code.

consumer        takes jobs, keeps what is in hand, reports it
async_consumer  the same, awaitable
job             a job as the caller gets it
"""

from lowq.consumer.async_consumer import AsyncConsumer, AsyncConsumerJob
from lowq.consumer.consumer import Consumer
from lowq.consumer.job import ConsumerJob

__all__ = ["AsyncConsumer", "AsyncConsumerJob", "Consumer", "ConsumerJob"]
