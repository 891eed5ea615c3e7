"""Weights that change while requests run: followed, verified, applied, switched, over HTTP too."""

from serving.hotload.host_arrays import HostArrays
from serving.hotload.subscriber import Status, Subscriber

__all__ = ["HostArrays", "Status", "Subscriber"]
