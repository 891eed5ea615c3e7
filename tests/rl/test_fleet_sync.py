"""Replicas behind a server follow a trainer; what one cannot use goes out again, whole."""

import contextlib
import threading

import pytest
import uvicorn

from glm_jax.errors import GlmError
from rl import hotload_client
from rl.hotload_client import HotLoadClient
from rl.publisher import Publisher
from rl.weight_sync import STAGES, FleetSync
from serving.hotload import Subscriber, app
from serving.hotload.ledger import Ledger
from serving.hotload.replica import Replica
from tests.serving.engine.models import bits, changed, contract, model, new_engine, params, prompt


def later(version):
    return changed(model(), embed=lambda x: x * (1 + version / 16))


@contextlib.contextmanager
def served(deployment):
    """The address of a server, in a thread."""
    config = uvicorn.Config(
        app.create_app(deployment), port=0, log_level="error", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def fleet(tmp_path):
    with contextlib.ExitStack() as stack:
        ledger, replicas = Ledger(tmp_path / "ledger.jsonl"), []
        for name in ("a", "b"):
            engine, place = new_engine(), (tmp_path / "store", tmp_path / name)
            follower = Subscriber(engine, model(), *place, on_event=ledger.recorder(name))
            replicas.append(stack.enter_context(Replica(name, engine, follower)))
        deployment = app.Deployment("me", "policy", replicas, ledger, token="key")
        url = stack.enter_context(served(deployment))
        client = HotLoadClient(url, "policy", token="key", poll=0.01, timeout=60)
        yield Publisher(tmp_path / "store", contract()), client, replicas, ledger


def test_all_replicas_serve_what_the_trainer_made_and_tokens_bear_its_version(fleet):
    publisher, client, replicas, _ = fleet
    sync = FleetSync(publisher, client)
    for version in (3, 4):
        seconds = sync(later(version), version)
        assert tuple(seconds) == STAGES and min(seconds.values()) > 0
    (a,), (b,) = (replica.submit(prompt(9), params()).result(60) for replica in replicas)
    direct = new_engine(later(4), version=4).generate([prompt(9)], params())[0][0]
    assert bits(a) == bits(b) == bits(direct) and set(a.weight_versions.tolist()) == {4}
    manifest = publisher.store.manifest()
    assert manifest.kind == "delta" and {r["readiness"] for r in client.replicas()} == {True}
    client.hint(manifest)


def test_what_one_replica_cannot_use_goes_out_again_whole(fleet, monkeypatch):
    publisher, client, replicas, ledger = fleet
    sync = FleetSync(publisher, client)
    sync(later(1), 1)
    follower, kinds = replicas[1].subscriber, []
    request = follower.request

    def torn(version, reset="all"):
        manifest = publisher.store.manifest(version)
        kinds.append(manifest.kind)
        if manifest.kind == "delta":  # this replica alone sees other bytes of its base
            follower._model = later(9)
        else:
            follower._model = later(1)
        request(version, reset)

    monkeypatch.setattr(follower, "request", torn)
    sync(later(2), 2)
    assert kinds == ["delta", "full"] and [replica._engine.version for replica in replicas] == [
        2,
        2,
    ]
    failed = [record for record in ledger.records() if record["outcome"] == "failed"]
    assert [r["replica"] for r in failed] == ["b"] and "other bytes" in failed[0]["error"]


def test_what_goes_wrong_on_the_way_is_named(fleet):
    publisher, client, replicas, _ = fleet
    manifest = publisher.publish(later(1), 1).manifest
    replicas[0].subscriber.switch = lambda: False
    client._timeout = 0.05
    with pytest.raises(GlmError, match=r"v00000000: replicas \['a'.*have not switched after 0.05"):
        client.load(manifest)
    replicas[0].error = "RuntimeError: lost"
    with pytest.raises(GlmError, match="replica a: RuntimeError: lost"):
        client.load(manifest)
    client._headers["authorization"] = "Bearer other"
    with pytest.raises(GlmError, match=r"status 401.*bearer token"):
        client.hint(manifest)
    with pytest.raises(GlmError, match=r"url: 'file:///etc' is neither"):
        HotLoadClient("file:///etc", "policy")
    with pytest.raises(GlmError, match=r"no answer .*; is it running"):
        HotLoadClient("http://127.0.0.1:9", "policy", timeout=1).replicas()
    assert hotload_client.PATH == app.PATH
