"""Hot-load over HTTP, in the shape of Fireworks' API: needs the extra `serve`."""

import dataclasses
import hmac
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, ConfigDict

from glm_jax.errors import GlmError
from serving.engine import ResetPromptCache
from serving.hotload.ledger import Ledger
from serving.hotload.replica import Replica
from serving.hotload.status import identity_of

COMPRESSION, CHECKSUM = "glm_delta", "sha256"
"""Names on the wire of what this project's stores hold."""
PATH = "/hot_load/v1/models/hot_load"


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Replicas that serve the same weights."""

    account: str
    name: str
    replicas: Sequence[Replica]
    ledger: Ledger
    token: str | None = None
    """What callers must bear; None lets anyone call."""

    def __post_init__(self):
        stores = {str(replica.subscriber.source.places.root) for replica in self.replicas}
        if len(stores) != 1:
            raise GlmError(
                f"replicas: follow {len(stores)} stores {sorted(stores)}; give replicas of one"
            )


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Incremental(_Body):
    """What a delta rests on, as the trainer knows it."""

    previous_snapshot_identity: str
    compression_format: Literal["glm_delta"] = COMPRESSION
    checksum_format: Literal["sha256"] = CHECKSUM


class Validation(_Body):
    """Accepted from clients that send it; tensors are validated by name, dtype, shape, digest."""

    extra_fields_ignore: list[str] = []


class HotLoad(_Body):
    """Asks for a version, by the name of its folder in the store."""

    identity: str
    incremental_snapshot_metadata: Incremental | None = None
    reset_prompt_cache: ResetPromptCache | bool = "all"
    validation: Validation | None = None


class Hint(_Body):
    """Announces a version."""

    identity: str


def hot_load_router(deployment: Deployment) -> APIRouter:
    """The routes of one deployment, for any app."""
    router = APIRouter(dependencies=[Depends(_guard(deployment))])

    @router.post(PATH)
    def hot_load(body: HotLoad) -> dict[str, Any]:
        version = _known(deployment, body.identity)
        _require_parent(deployment, version, body)
        reset = body.reset_prompt_cache
        if isinstance(reset, bool):
            reset = "all" if reset else "none"
        for replica in deployment.replicas:
            replica.subscriber.request(version, reset)
        return {"identity": body.identity, **_state(deployment)}

    @router.get(PATH)
    def state() -> dict[str, Any]:
        return _state(deployment)

    @router.post(f"{PATH}/hint")
    def hint(body: Hint) -> dict[str, Any]:
        version = _known(deployment, body.identity)
        for replica in deployment.replicas:
            replica.subscriber.hint(version)
        return {"identity": body.identity}

    ledger = f"/v1/accounts/{deployment.account}/deployments/{deployment.name}/ledger"

    @router.get(ledger)
    def records() -> dict[str, Any]:
        return {"records": deployment.ledger.records()}

    @router.delete(ledger)
    def reset() -> dict[str, Any]:
        deployment.ledger.reset()
        return {}

    return router


def create_app(deployment: Deployment) -> FastAPI:
    """An app of these routes alone. The replicas' threads are the caller's to run."""
    app = FastAPI(title="glm-jax hot-load")
    app.include_router(hot_load_router(deployment))
    return app


def _guard(deployment: Deployment) -> Any:
    expected = None if deployment.token is None else f"Bearer {deployment.token}"

    def guard(
        authorization: Annotated[str | None, Header()] = None,
        fireworks_deployment: Annotated[str | None, Header()] = None,
    ) -> None:
        given = (authorization or "").encode()
        if expected is not None and not hmac.compare_digest(given, expected.encode()):
            raise HTTPException(401, "authorization: give this deployment's bearer token")
        short = (fireworks_deployment or deployment.name).rpartition("/")[2]
        if short != deployment.name:
            raise HTTPException(
                404, f"fireworks-deployment: {short!r} is not here; name {deployment.name!r}"
            )

    return guard


def _known(deployment: Deployment, identity: str) -> int:
    """Number of a version that the store lists; whether it is sound, the status tells."""
    match = re.fullmatch(r"v(\d{8})", identity)
    if match is None:
        raise HTTPException(
            400, f"identity: {identity!r:.60} is none; give a folder's name, v and eight digits"
        )
    version, source = int(match[1]), deployment.replicas[0].subscriber.source
    try:
        versions = source.versions()
    except Exception as error:  # a store's client may raise anything
        raise HTTPException(503, f"store: cannot be read ({error!r}); try again") from error
    if version not in versions:
        raise HTTPException(404, f"identity: {identity} is not in the store; publish it first")
    return version


def _require_parent(deployment: Deployment, version: int, body: HotLoad) -> None:
    if (claimed := body.incremental_snapshot_metadata) is None:
        return
    try:
        manifest = deployment.replicas[0].subscriber.source.manifest(version)
    except GlmError as error:
        raise HTTPException(400, f"identity: {error}") from error
    if (parent := identity_of(manifest.parent)) != claimed.previous_snapshot_identity:
        raise HTTPException(
            400,
            f"previous_snapshot_identity: {claimed.previous_snapshot_identity!r:.60}, but "
            f"{body.identity} rests on {parent}; name that, or leave the field out",
        )


def _state(deployment: Deployment) -> dict[str, Any]:
    return {"replicas": [_replica(replica) for replica in deployment.replicas]}


def _replica(replica: Replica) -> dict[str, Any]:
    status = replica.subscriber.status
    return {
        "name": replica.name,
        "current_snapshot_identity": identity_of(status.version),
        "previous_snapshot_identity": identity_of(status.parent),
        "readiness": status.ready and replica.error is None,
        "loading_state": {
            "stage": status.stage,
            "target_snapshot_identity": identity_of(status.target),
            "error": status.error,
        },
        "seconds": vars(replica.subscriber.times),
        "ended": replica.error,
        "transition": replica.subscriber.mode,
        "loaded_adapters": [],
    }
