"""The numerics contract stored with weights: what they were trained under."""

import json
import logging
from pathlib import Path
from typing import Any

from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract, require_same

FILE = "numerics.json"
"""Beside config.json. Other readers of the hub's layout do not look at it."""

_LOG = logging.getLogger(__name__)


def contract_to_json(contract: NumericsContract) -> dict[str, Any]:
    """Digest and fields."""
    return {"digest": contract.digest, "contract": contract.to_dict()}


def compare_contracts(contract: NumericsContract | None, stored: Any, source: str) -> None:
    """Refuses weights that were stored under another contract than the one asked for.

    Args:
        contract: the one asked for; None accepts anything.
        stored: what `contract_to_json` gave, or None if the checkpoint has none: accepted, and
            logged.
        source: named in errors.

    Raises:
        GlmError: names the differing fields, or says what is wrong with `stored`.
    """
    if contract is None:
        return
    if stored is None:
        _LOG.warning(
            "%s: stores no numerics contract; its weights are used under %s",
            source,
            contract.digest,
        )
        return
    require_same(contract, _parse(stored, source), source)


def _parse(stored: Any, source: str) -> NumericsContract:
    remedy = "save the checkpoint again, or load it without `contract`"
    fields = stored.get("contract") if isinstance(stored, dict) else None
    if not isinstance(fields, dict):
        raise GlmError(f"{source}: its numerics contract has no fields; {remedy}")
    try:
        contract = NumericsContract.from_dict(fields)
    except (GlmError, TypeError) as error:
        raise GlmError(f"{source}: its numerics contract cannot be used: {error}") from error
    if contract.digest != stored.get("digest"):
        raise GlmError(
            f"{source}: the fields of its numerics contract give digest {contract.digest}, stored "
            f"is {stored.get('digest')}: it was edited; {remedy}"
        )
    return contract


def write_contract_file(directory: Path, contract: NumericsContract) -> None:
    """Writes numerics.json."""
    text = json.dumps(contract_to_json(contract), indent=2) + "\n"
    (directory / FILE).write_text(text, encoding="utf-8")


def read_contract_file(directory: Path) -> Any:
    """What numerics.json holds; None if there is none.

    Raises:
        GlmError: it is no JSON.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GlmError(f"{path}: is no JSON ({error}); save the checkpoint again") from error
