"""Baking: writing a checkpoint that loads anywhere, from a base model and its factors.

No tensor is read and no torch imported, unless the weights are pickled. They are cloned as files,
config.json gets the factors and the names of the classes that apply them, and everything else that
makes up the source is carried over byte for byte.
"""

from __future__ import annotations

import errno
import importlib.resources
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lpes_bake.card import auto_class, is_hub_name, model_card
from lpes_bake.factors import Factors, base_facts, check_factors
from lpes_bake.search.errors import InputError
from lpes_bake.source import (
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHT_SUFFIXES,
    Source,
    read_header,
    read_json,
    user_path,
    weight_files,
)

Weights = Literal["copy", "hardlink", "symlink"]
Way = Literal["copy", "hardlink", "symlink", "mark", "convert"]

# Linux: _IOW(0x94, 9, int). The new file shares its blocks with the old one until one of them changes.
FICLONE = 0x40049409
# Room for config.json, the card and what the file system needs besides.
SPARE_BYTES = 4 << 20
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Baked:
    """What a bake did.

    files: name → how it came to be (written, copied, cloned, hardlinked, symlinked; marked: copied
    with a header that says "pt"; converted from a pickle). left_out: files of the source that do not
    belong into a baked checkpoint → why.
    """

    out: Path
    base_model: str
    revision: str | None
    auto_class: str
    files: dict[str, str]
    left_out: dict[str, str]
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {**asdict(self), "out": str(self.out)}


def bake(
    source: Source,
    factors: Factors,
    out: Path,
    *,
    weights: Weights = "copy",
    overwrite: bool = False,
    base_model: str | None = None,
    notify: Callable[[str], None] = lambda name: None,
) -> Baked:
    """Write `source` with `factors` to the directory `out`, whole or not at all.

    weights: "copy" clones where the file system can; files that cannot stay as they are (pickles, or
    without the mark of PyTorch's) are written anew whatever it says. overwrite: replace what is at `out`. base_model:
    the Hub name for the card, when the source's own name is not it. notify: told each file's name
    before it is copied. Raises InputError before anything is written, and for a disk that fills up.
    """
    check_factors(factors, source)
    if base_model is not None and not is_hub_name(base_model):
        raise InputError(f"{base_model!r} is not a valid name on the Hub: the model card needs one like org/name")
    out = user_path(out)
    check_place(source.path, out, overwrite)
    used = weight_files(source.path)
    carried, left_out = survey(source, used)
    check_apart(source.path, carried, out)
    ways = {name: way_of(source.path / name, used, weights) for name in carried}
    base_model = base_model or source.name
    known = factors.base if factors.base and factors.base.get("name") else base_facts(source)
    record = replace(factors, base=known)
    texts = {
        "config.json": json.dumps(baked_config(source, factors), indent=2, ensure_ascii=False) + "\n",
        "factors.json": record.to_text(),
        "README.md": model_card(source, record, base_model=base_model, title=out.resolve().name),
    }
    target = out.resolve()
    files: dict[str, str] = {}
    try:
        with replacing(target) as scratch:
            check_space(source.path, ways, scratch)
            for name, way in ways.items():
                if way != "convert":
                    notify(name)
                    files[name] = transfer(source.path / name, scratch / name, way)
            pickles = {source.path / name: used[source.path / name] for name in ways if ways[name] == "convert"}
            if pickles:
                from lpes_bake.convert import convert_pickles

                files |= dict.fromkeys(convert_pickles(pickles, scratch, source.config, notify), "converted")
            shipped = importlib.resources.files("lpes_bake.modeling")
            for name in source.family.files:
                (scratch / name).write_bytes((shipped / name).read_bytes())
                files[name] = "written"
            for name, text in texts.items():
                (scratch / name).write_text(text, encoding="utf-8")
                files[name] = "written"
            size = sum((scratch / name).stat().st_size for name in files)
            check_place(source.path, out, overwrite)  # again: copying takes long, and others write here, too
    except UnicodeEncodeError as error:
        raise InputError(f"{out} could not be written: a name or {source.name}'s config.json is not Unicode") from error
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise InputError(
            f"{out} could not be written, and nothing was left behind: {error.strerror or error}{place}"
        ) from error
    loader = auto_class(source.architecture)
    return Baked(target, base_model, source.revision, loader, dict(sorted(files.items())), left_out, size)


def baked_config(source: Source, factors: Factors) -> dict[str, Any]:
    """config.json of the bake: the source's, RoPE settings and all, but for what makes it load with the factors."""
    return {
        **source.config,
        "model_type": source.family.model_type,
        "architectures": [source.family.architectures[source.architecture]],
        "auto_map": source.family.auto_map,
        "layer_rope_scaling": list(factors.layer_rope_scaling),
    }


def check_place(base: Path, out: Path, overwrite: bool) -> None:
    """InputError when `out` is no place for a bake."""
    target, base = out.resolve(), base.resolve()
    if target == base or base in target.parents:
        raise InputError(f"{out} lies in the source directory {base}: choose a place outside it")
    if target in base.parents:
        raise InputError(f"{out} holds the source directory {base}: choose another place")
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{out} is a file: give a directory to write to")
    if target == Path.cwd():
        raise InputError(f"{out} is the working directory, which a bake replaces: choose another place")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{out} exists and is not empty: choose another place, or replace it whole with --overwrite")
    for kept, what in ((Path.cwd(), "the working directory"), (Path.home(), "the home directory")):
        if target == kept or target in kept.parents:
            raise InputError(f"{out} holds {what}, which --overwrite would delete: choose another place")
    if (target / ".git").exists():
        raise InputError(f"{out} is a git repository, which --overwrite would delete: choose another place")


def check_apart(base: Path, carried: list[str], out: Path) -> None:
    """InputError when replacing `out` would delete files that links in the source lead to: blobs of the Hub's cache."""
    target = out.resolve()
    for name in ("config.json", *carried):
        if target in (base / name).resolve().parents:
            raise InputError(f"{out} holds {name} of the source, behind a link: choose another place")


def survey(source: Source, used: Collection[Path]) -> tuple[list[str], dict[str, str]]:
    """The names of the files to carry over, and what is left out with the reason.

    All files ride along, in subfolders too, but for: weights that transformers does not load, with the
    subfolder they lie in (original/, onnx/: the model in another format); Python files, which nothing
    in a plain checkpoint refers to; hidden folders; and what the bake writes itself.
    """
    tokenizer_config = source.path / "tokenizer_config.json"
    if tokenizer_config.is_file() and read_json(tokenizer_config, source.name).get("auto_map"):
        raise InputError(f"{source.name} has a tokenizer with code of its own (auto_map), which cannot be baked")
    own = {"config.json", "factors.json", "README.md", *source.family.files}
    carried: list[str] = []
    left_out: dict[str, str] = {}
    for folder, subfolders, names in os.walk(source.path):
        here = Path(folder)
        prefix = "" if here == source.path else f"{here.relative_to(source.path).as_posix()}/"
        foreign = {n for n in names if Path(n).suffix.lower() in WEIGHT_SUFFIXES and here / n not in used}
        if foreign and prefix and not any(here in path.parents for path in used):
            left_out[prefix] = f"the model in another format ({min(foreign)})"
            subfolders.clear()
            continue
        left_out |= {f"{prefix}{n}/": "a link to a directory" for n in subfolders if (here / n).is_symlink()}
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n != "__pycache__"]
        for name in names:
            full = prefix + name
            if full in own or name == ".DS_Store":
                continue
            if name in foreign:
                left_out[full] = "weights that transformers does not load"
            elif name.endswith(".index.json") and (full != INDEX_FILE or source.path / SINGLE_FILE in used):
                left_out[full] = "an index of weights that are not in the bake"
            elif name.endswith(".py"):
                left_out[full] = "code that nothing refers to"
            elif (here / name).is_file():
                carried.append(full)
            elif not (here / name).exists():
                raise InputError(f"{here / name} is a broken link: fetch the model again")
    lost = {path.relative_to(source.path).as_posix() for path in used} - set(carried)
    if lost:
        raise InputError(f"{source.path / min(lost)} lies in a hidden or linked folder: move it beside config.json")
    return sorted(carried), dict(sorted(left_out.items()))


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A scratch directory beside `target` that takes its place at the end, or vanishes if anything fails.

    What was at `target` comes back if the last step fails.
    """
    missing = [parent for parent in target.parents if not parent.exists()]
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield scratch
        # mkdtemp's directories are for their owner's eyes only; a checkpoint is like any other directory.
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o777 & ~umask)
        swap(scratch, target)
    except BaseException:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


def swap(scratch: Path, target: Path) -> None:
    """Put `scratch` where `target` is, and delete what was there only after that has worked."""
    old = scratch.with_name(f"{scratch.name}.old")
    if target.exists():
        target.rename(old)
    try:
        scratch.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def way_of(path: Path, used: Collection[Path], weights: Weights) -> Way:
    """How a file of the source gets into the bake."""
    if path not in used:
        return "copy"
    if path.suffix == ".bin":
        return "convert"
    return weights if "format" in read_header(path).metadata else "mark"


def check_space(base: Path, ways: Mapping[str, Way], scratch: Path) -> None:
    """InputError when the files to write do not fit on the disk. Clones and links need no room."""
    probe = scratch / ".probe"
    clones = clone(base / "config.json", probe)
    probe.unlink(missing_ok=True)
    written = ("mark", "convert") if clones else ("copy", "mark", "convert")
    needed = sum((base / name).stat().st_size for name, way in ways.items() if way in written) + SPARE_BYTES
    require_space(scratch.parent, needed, "free some, choose another disk, or see --weights")


def require_space(place: Path, needed: int, mend: str) -> None:
    """InputError when `needed` bytes do not fit on the disk of the directory `place`."""
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(f"{place} has {free / 1e9:.2f} GB free, and the bake needs {needed / 1e9:.2f} GB: {mend}")


def transfer(old: Path, new: Path, way: Way) -> str:
    """Bring one file over; says how that was done. Links in the source are followed."""
    new.parent.mkdir(parents=True, exist_ok=True)
    if way == "symlink":
        new.symlink_to(old.resolve())
        return "symlinked"
    if way == "hardlink":
        try:
            new.hardlink_to(old.resolve())
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise InputError(
                    f"{old} is on another disk, so it cannot be hard-linked: use --weights copy"
                ) from error
            raise
        return "hardlinked"
    if way == "mark":
        mark(old, new)
        return "marked"
    if clone(old, new):
        return "cloned"
    shutil.copyfile(old, new)
    return "copied"


def mark(old: Path, new: Path) -> None:
    """Copy a safetensors file with a header that says that it is PyTorch's: some loaders refuse it without."""
    header = read_header(old)
    entries = {"__metadata__": {**header.metadata, "format": "pt"}, **header.tensors}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes, as the safetensors library has it
    with old.open("rb") as source, new.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        source.seek(header.start)
        shutil.copyfileobj(source, target, COPY_BYTES)


def clone(old: Path, new: Path) -> bool:
    """Make `new` share the blocks of `old` until one of them changes; False where the file system cannot."""
    if sys.platform != "linux":
        return False
    import fcntl

    with old.open("rb") as source, new.open("wb") as target:
        try:
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
        except OSError:
            return False
    return True
