"""Weights that change while requests run: followed, verified, applied, switched, over HTTP too."""

from serving.hotload.follow import following
from serving.hotload.status import Status, identity_of
from serving.hotload.subscriber import Subscriber

__all__ = ["Status", "Subscriber", "following", "identity_of"]
