"""`glm-jax delta`: chains of weight versions on disk or in an object store."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm_jax.errors import GlmError

if TYPE_CHECKING:  # importing them would import numba
    from glm_jax.checkpoint.delta.manifest import Manifest
    from glm_jax.checkpoint.delta.store import DeltaStore

app = typer.Typer(help="Weight versions: full ones and the deltas between.", no_args_is_help=True)

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Folder or URL of a chain.")]
VersionOption = Annotated[int | None, typer.Option(help="Default: the newest.")]
ContractOption = Annotated[
    str | None, typer.Option(help="Digest of the numerics contract that versions must have.")
]
ThreadsOption = Annotated[int, typer.Option(help="Tensors at once, and so in memory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def deltas() -> None:
    """Weight versions: full ones and the deltas between."""


@app.command()
def make(
    store: StoreArgument,
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Directory of safetensors files.")
    ],
    full: Annotated[bool, typer.Option("--full", help="Save a full version.")] = False,
    full_every: Annotated[int, typer.Option(help="A full version at least this often.")] = 25,
    level: Annotated[str, typer.Option(help="small or fast.")] = "small",
    step: Annotated[int | None, typer.Option(help="The trainer's step, recorded.")] = None,
    keep: Annotated[
        int | None,
        typer.Option(help="Then remove all but so many versions and those that they rest on."),
    ] = None,
    contract: ContractOption = None,
    threads: ThreadsOption = 2,
) -> None:
    """Save a checkpoint as the next version: a delta, unless a full one is due."""
    chain = _store(store, contract, threads, full_every=full_every, level=level)
    if keep is not None and keep < 1:
        raise GlmError(f"--keep {keep}: must be positive")
    manifest = chain.save(_checkpoint(checkpoint), full=full, step=step)
    print(_line(manifest))
    if keep is not None and (gone := chain.collect(keep)):
        print(f"removed {', '.join(map(str, gone))}")


@app.command()
def apply(
    store: StoreArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    version: VersionOption = None,
    contract: ContractOption = None,
    threads: ThreadsOption = 2,
) -> None:
    """Rebuild a version as one full version in a store of its own: OUT/v00000000/.

    Every tensor is verified. The folder holds model.safetensors.
    """
    chain = _store(store, contract, threads)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GlmError(f"{out}: is not an empty folder; give another")
    snapshot = chain.open(version)
    rebuilt = _store(str(out), snapshot.manifest.contract, threads)
    print(_line(rebuilt.save(snapshot, full=True, step=snapshot.manifest.step)))


@app.command()
def verify(
    store: StoreArgument,
    version: VersionOption = None,
    contract: ContractOption = None,
    threads: ThreadsOption = 2,
) -> None:
    """Rebuild a version, or with no --version every one, and compare digests.

    Exit status 1 if one cannot be rebuilt.
    """
    chain = _store(store, contract, threads)
    chain.manifest(version)  # none at all is a usage error
    failed = 0
    for n in chain.versions() if version is None else [version]:
        try:
            print(f"{_line(chain.verify(n))}, verified")
        except GlmError as error:
            print(f"{n}: {error}")
            failed += 1
    raise typer.Exit(int(failed > 0))


@app.command()
def info(
    store: StoreArgument,
    version: VersionOption = None,
    contract: ContractOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a version: its chain, sizes, and the tensors that take most."""
    chain = _store(store, contract, 1)
    manifests = chain.chain(version)
    manifest = manifests[-1]
    if as_json:
        print(json.dumps(_figures(manifest) | {"chain": [x.version for x in manifests]}, indent=2))
        return
    print(_line(manifest))
    print(f"rests on {', '.join(str(x.version) for x in manifests[:-1]) or 'nothing'}")
    largest = sorted(manifest.tensors.items(), key=lambda item: -item[1].stored)[:10]
    for name, entry in largest:
        share = f"{entry.stored / entry.n_bytes:.3%}" if entry.n_bytes else "empty"
        print(f"{entry.stored:>14,} bytes {share:>9}  {name} {entry.dtype} {list(entry.shape)}")


@app.command()
def log(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List the versions."""
    chain = _store(store, None, 1)
    chain.manifest()
    manifests = [chain.manifest(n) for n in chain.versions()]
    if as_json:
        print(json.dumps([_figures(x) for x in manifests], indent=2))
        return
    for manifest in manifests:
        print(_line(manifest))


@app.command()
def export(
    store: StoreArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new file.")],
    version: VersionOption = None,
    contract: ContractOption = None,
) -> None:
    """Write a delta version as OUT/model.safetensors in Fireworks' arc_v2.

    Prints the fields of a hot-load request that describe it.
    """
    from glm_jax.checkpoint.delta.arc_v2 import CHECKSUM_FORMAT, COMPRESSION_FORMAT, write_arc_v2

    chain = _store(store, contract, 1)
    manifest = chain.manifest(version)
    if manifest.parent is None:
        raise GlmError(f"version {manifest.version}: is full, not a delta; glm-jax delta apply it")
    old, new = chain.open(manifest.parent), chain.open(manifest.version)
    write_arc_v2(out / "model.safetensors", old, new)
    fields = {
        "previous_snapshot_identity": str(manifest.parent),
        "compression_format": COMPRESSION_FORMAT,
        "checksum_format": CHECKSUM_FORMAT,
    }
    print(json.dumps(fields))


@app.command("import")
def import_(
    store: StoreArgument,
    delta: Annotated[
        Path, typer.Argument(metavar="DELTA", help="Folder of safetensors files in arc_v2.")
    ],
    step: Annotated[int | None, typer.Option(help="The trainer's step, recorded.")] = None,
    contract: ContractOption = None,
    threads: ThreadsOption = 2,
) -> None:
    """Save what Fireworks' arc_v2 makes of the newest version as the next version.

    Nothing is saved unless every checksum agrees.
    """
    from glm_jax.checkpoint.delta.arc_v2 import ArcV2

    chain = _store(store, contract, threads)
    if not (files := sorted(delta.glob("*.safetensors"))):
        raise GlmError(f"{delta}: holds no safetensors files; give the folder of a delta")
    print(_line(chain.save(ArcV2(chain.open(), *files), step=step)))


def _store(place: str, contract: str | None, threads: int, **options: Any) -> "DeltaStore":
    from glm_jax.checkpoint.delta.store import DeltaStore

    if options.get("level", "small") not in ("small", "fast"):
        raise GlmError(f"--level {options['level']}: no such level; use small or fast")
    return DeltaStore(place, contract=contract, n_threads=threads, **options)


def _checkpoint(directory: Path) -> dict[str, Any]:
    """Memory-mapped arrays by name."""
    from glm_jax.checkpoint.problems import Problems
    from glm_jax.checkpoint.safetensors_files import open_files

    if not directory.is_dir():
        raise GlmError(f"{directory}: no such folder; give one of safetensors files")
    problems = Problems(directory)
    files = open_files(directory, problems)
    problems.raise_if_any()
    return {name: stored.map() for name, stored in files.tensors.items()}


def _figures(manifest: "Manifest") -> dict[str, Any]:
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "parent": manifest.parent,
        "step": manifest.step,
        "contract": manifest.contract,
        "tensors": len(manifest.tensors),
        "weights_bytes": manifest.n_bytes,
        "stored_bytes": manifest.data_bytes,
    }


def _line(manifest: "Manifest") -> str:
    x = _figures(manifest)
    share = f"{x['stored_bytes'] / max(1, x['weights_bytes']):.3%}"
    parent = "" if x["parent"] is None else f" of {x['parent']}"
    step = "" if x["step"] is None else f", step {x['step']}"
    return (
        f"version {x['version']}: {x['kind']}{parent}, {x['stored_bytes']:,} bytes ({share} of "
        f"{x['weights_bytes']:,}), {x['tensors']} tensors{step}, contract {x['contract'] or 'none'}"
    )
