"""Consumers as functions: decorate, run, retry and stop them."""

from penstock.app.app import App
from penstock.app.consumer import BatchHandler, Consumer, ErrorHandler, MessageHandler
from penstock.app.retry import Retry

__all__ = ["App", "BatchHandler", "Consumer", "ErrorHandler", "MessageHandler", "Retry"]
