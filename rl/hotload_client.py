"""A deployment's hot-load routes, as a trainer calls them."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.errors import GlmError
from serving.hotload import identity_of

PATH = "/hot_load/v1/models/hot_load"

ANSWER_SECONDS = 60.0
"""One answer of the server may take so long; it only looks things up."""


class HotLoadClient:
    """Asks replicas elsewhere for versions of a store that they and the trainer can reach.

    Args:
        url: of the server, http or https.
        deployment: its name there.
        token: what the deployment demands, if it does.
        timeout: seconds that a load may take on all replicas.
        poll: seconds between two looks.

    Raises:
        GlmError: another scheme.
    """

    def __init__(
        self,
        url: str,
        deployment: str,
        *,
        token: str | None = None,
        timeout: float = 600.0,
        poll: float = 5.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise GlmError(f"url: {url!r:.60} is neither http:// nor https://; give the server's")
        self._url, self._timeout, self._poll = url.rstrip("/"), timeout, poll
        self._headers = {"content-type": "application/json", "fireworks-deployment": deployment}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    def replicas(self) -> list[dict[str, Any]]:
        """Where each replica is.

        Raises:
            GlmError: the server refuses, or cannot be reached.
        """
        return self._call("GET", PATH)["replicas"]

    def hint(self, manifest: Manifest) -> None:
        """Announces a version, so that replicas copy it. Raises as `replicas`."""
        self._call("POST", f"{PATH}/hint", {"identity": identity_of(manifest.version)})

    def load(self, manifest: Manifest, *, reset_prompt_cache: str = "all") -> list[dict[str, Any]]:
        """Asks for a version, waits until it serves on all replicas, and returns where they are.

        What replicas say of other versions is no matter.

        Raises:
            GlmError: the server refuses, a replica fails at this version or has ended (named, with
                its reason), or they take longer than the timeout.
        """
        identity = identity_of(manifest.version)
        body: dict[str, Any] = {"identity": identity, "reset_prompt_cache": reset_prompt_cache}
        if manifest.parent is not None:
            parent = identity_of(manifest.parent)
            body["incremental_snapshot_metadata"] = {"previous_snapshot_identity": parent}
        self._call("POST", PATH, body)
        end = time.monotonic() + self._timeout
        while True:
            replicas = self._call("GET", PATH, end=end)["replicas"]
            for replica in replicas:
                _require_sound(replica, identity)
            waiting = [r["name"] for r in replicas if not _serves(r, identity)]
            if not waiting:
                return replicas
            if time.monotonic() > end:
                raise GlmError(
                    f"{identity}: replicas {waiting} have not switched after {self._timeout:g} s; "
                    "look at their status, or allow more time"
                )
            time.sleep(self._poll)

    def _call(self, method: str, path: str, body: Any = None, end: float = 0.0) -> Any:
        """The answer; without one it asks again until `end` (of the monotonic clock)."""
        data = None if body is None else json.dumps(body).encode()
        url = self._url + path
        request = urllib.request.Request(url, data, self._headers, method=method)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                reason = error.read(2000).decode(errors="replace")
                raise GlmError(f"{url}: status {error.code}, {reason}") from error
            except (OSError, ValueError) as error:
                if time.monotonic() > end:
                    raise GlmError(f"{url}: no answer ({error}); is it running?") from error
            time.sleep(self._poll)


def _require_sound(replica: dict[str, Any], identity: str | None) -> None:
    state = replica["loading_state"]
    ours = state["target_snapshot_identity"] == identity and state["stage"] == "failed"
    if ours or replica["ended"]:
        reason = replica["ended"] or state["error"]
        raise GlmError(f"{identity}: replica {replica['name']}: {reason}")


def _serves(replica: dict[str, Any], identity: str | None) -> bool:
    return replica["readiness"] and replica["current_snapshot_identity"] == identity
