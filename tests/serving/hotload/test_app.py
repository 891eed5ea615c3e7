"""Hot-load over HTTP: two replicas follow one store; what is wrong is said, and harms nothing."""

import contextlib
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from serving.hotload import Subscriber, following
from serving.hotload.app import PATH, Deployment, create_app
from serving.hotload.ledger import Ledger
from serving.hotload.replica import Replica
from tests.serving.engine.models import bits, changed, contract, model, new_engine, params, prompt

LEDGER = "/v1/accounts/me/deployments/policy/ledger"
HEADERS = {"authorization": "Bearer key", "fireworks-deployment": "accounts/me/deployments/policy"}


def publish(store, step, **more):
    weights = changed(model(), embed=lambda x: x * (1 + step / 16))
    return store.save(HostArrays.of(weights), step=step, **more)


@pytest.fixture
def setup(tmp_path):
    store = DeltaStore(tmp_path / "store", contract=contract().digest)
    publish(store, 1)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with contextlib.ExitStack() as stack:
        replicas = []
        for name in ("a", "b"):
            engine = new_engine()
            follower = Subscriber(
                engine,
                model(),
                tmp_path / "store",
                tmp_path / name,
                on_event=ledger.recorder(name),
            )
            replicas.append(stack.enter_context(Replica(name, engine, follower)))
        deployment = Deployment("me", "policy", replicas, ledger, token="key")
        yield store, replicas, TestClient(create_app(deployment), headers=HEADERS)


def until(client, wanted):
    """Waits for a state of all replicas."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        states = client.get(PATH).json()["replicas"]
        if all(wanted(state) for state in states):
            return states
        time.sleep(0.01)
    raise AssertionError(states)


def serves(identity):
    return lambda state: state["readiness"] and state["current_snapshot_identity"] == identity


def test_replicas_load_a_chain_serve_the_same_bits_and_keep_a_ledger(setup):
    store, replicas, client = setup
    assert client.get(PATH).json()["replicas"][0]["current_snapshot_identity"] is None
    assert client.post(PATH, json={"identity": "v00000000"}).status_code == 200
    until(client, serves("v00000000"))
    publish(store, 2)
    assert client.post(f"{PATH}/hint", json={"identity": "v00000001"}).status_code == 200
    metadata = {
        "previous_snapshot_identity": "v00000000",
        "compression_format": "glm_delta",
        "checksum_format": "sha256",
    }
    body = {
        "identity": "v00000001",
        "incremental_snapshot_metadata": metadata,
        "reset_prompt_cache": False,
    }
    assert client.post(PATH, json=body).status_code == 200
    states = until(client, serves("v00000001"))
    assert states[0]["previous_snapshot_identity"] == "v00000000"
    a, b = (replica.submit(prompt(9), params()) for replica in replicas)
    (first,), (second,) = a.result(60), b.result(60)
    assert bits(first) == bits(second) and np.unique(first.weight_versions).tolist() == [2]
    records = client.get(LEDGER).json()["records"]
    applied = sorted((r["replica"], r["identity"]) for r in records if r["outcome"] == "applied")
    assert applied == [(n, v) for n in "ab" for v in ("v00000000", "v00000001")]
    assert client.delete(LEDGER).status_code == 200
    assert client.get(LEDGER).json() == {"records": []}


def test_a_damaged_version_is_reported_and_a_full_one_heals(setup):
    store, _, client = setup
    client.post(PATH, json={"identity": "v00000000"})
    until(client, serves("v00000000"))
    manifest = publish(store, 2)
    store.places.data(manifest).write_bytes(b"\0" * manifest.data_bytes)
    client.post(PATH, json={"identity": "v00000001"})
    states = until(client, lambda state: state["loading_state"]["stage"] == "failed")
    for state in states:
        assert state["current_snapshot_identity"] == "v00000000" and not state["readiness"]
        assert state["loading_state"]["target_snapshot_identity"] == "v00000001"
        assert state["loading_state"]["error"].startswith("version 1")
    publish(store, 3, full=True)
    client.post(PATH, json={"identity": "v00000002", "reset_prompt_cache": "new_session"})
    assert until(client, serves("v00000002"))[0]["loading_state"]["error"] is None
    outcomes = [r["outcome"] for r in client.get(LEDGER).json()["records"]]
    assert outcomes.count("failed") == 2 and outcomes.count("applied") == 4


def test_a_follower_asks_for_new_versions_by_itself(setup):
    store, replicas, client = setup
    with following(replicas[0].subscriber, 0.02), following(replicas[1].subscriber, 0.02):
        until(client, serves("v00000000"))
        publish(store, 2)
        until(client, serves("v00000001"))


def test_replicas_of_two_stores_are_no_deployment(setup, tmp_path):
    _, replicas, _ = setup
    stray = Subscriber(new_engine(), model(), tmp_path / "elsewhere", tmp_path / "c")
    for wrong in ([], [replicas[0], Replica("c", new_engine(), stray)]):
        with pytest.raises(GlmError, match=f"replicas: follow {len(wrong)} stores"):
            Deployment("me", "policy", wrong, Ledger(tmp_path / "other.jsonl"))


def test_a_store_that_cannot_be_read_is_said_to_be_so(setup, monkeypatch):
    _, replicas, client = setup

    def unreachable():
        raise ConnectionError("no route")

    monkeypatch.setattr(replicas[0].subscriber.source, "versions", unreachable)
    answer = client.post(PATH, json={"identity": "v00000000"})
    assert answer.status_code == 503 and "no route" in answer.text


def test_bad_and_cancelled_requests_harm_no_replica(setup):
    _, replicas, _ = setup
    replica = replicas[0]
    with pytest.raises(GlmError, match="outside the vocabulary"):
        replica.submit([1 << 20], params()).result(60)
    for _ in range(20):  # some are cancelled while they wait, of others it is too late
        future = replica.submit(prompt(9), params())
        assert future.cancel() or future.result(60)
    assert replica.submit(prompt(9), params()).result(60) and replica.error is None


def test_a_line_that_was_cut_spoils_no_other(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.add({"n": 1})
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"n": 2, "out')
    ledger.add({"n": 3})
    assert [record["n"] for record in ledger.records()] == [1, 3]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"identity": "../etc"}, 400, "identity: '../etc' is none"),
        ({"identity": "v00000009"}, 404, "v00000009 is not in the store"),
        ({"identity": "v00000000", "extra": 1}, 422, "extra"),
        ({"identity": "v00000000", "reset_prompt_cache": "some"}, 422, "reset_prompt_cache"),
        (
            {
                "identity": "v00000000",
                "incremental_snapshot_metadata": {"previous_snapshot_identity": "v00000007"},
            },
            400,
            "v00000000 rests on None",
        ),
    ],
)
def test_bad_requests_are_refused_by_name(setup, body, status, reason):
    _, _, client = setup
    answer = client.post(PATH, json=body)
    assert answer.status_code == status and reason in answer.text
    assert client.get(PATH).json()["replicas"][0]["loading_state"]["stage"] == "idle"


def test_callers_need_the_token_and_the_deployment(setup):
    _, _, client = setup
    assert client.get(PATH, headers={"authorization": "Bearer other"}).status_code == 401
    answer = client.get(PATH, headers={"fireworks-deployment": "other"})
    assert answer.status_code == 404 and "name 'policy'" in answer.text
