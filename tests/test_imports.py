"""Who may import whom, read from the source: the house of the README, held by a test."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("ddtree_jax", "pallas_kernels", "convert", "scripts", "tests")

# Lower layers first: a module imports from its own layer or below.
LAYERS = (
    ("config", "errors", "outputs", "choices", "plan"),
    ("models", "cache", "tree", "sampling", "topk", "params", "recurrent"),
    ("state", "checkpoint"),
    ("stages",),
    ("round", "prefill"),
    ("engine",),
    ("text",),
    ("continuation",),
    ("llm", "explain"),
    ("__init__", "__main__"),
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top(name: str) -> str:
    return name.split(".")[0]


def layer_of(name: str) -> int | None:
    """Layer of a dotted name inside ddtree_jax, None for anything else."""
    parts = name.split(".")
    if parts[0] != "ddtree_jax" or len(parts) == 1:
        return None
    for level, members in enumerate(LAYERS):
        if parts[1] in members:
            return level
    return None


@pytest.mark.parametrize("package", ["ddtree_jax", "pallas_kernels", "convert"])
def test_runtime_never_imports_torch_tests_or_scripts(package):
    for path in sources(package):
        found = {top(name) for name in imports(path)} & {"torch", "tests", "scripts"}
        assert not found, f"{path} imports {found}"


def test_pallas_kernels_know_no_model():
    allowed = {"jax", "numpy", "jaxtyping", "pallas_kernels", *sys.stdlib_module_names}
    for path in sources("pallas_kernels"):
        extra = {top(name) for name in imports(path)} - allowed
        if path.stem.endswith("_triton"):
            extra -= {"jax_triton", "triton"}
        assert not extra, f"{path} imports {extra}"


def test_ddtree_jax_imports_downwards():
    for path in sources("ddtree_jax"):
        relative = path.relative_to(ROOT).with_suffix("")
        own = layer_of(".".join(relative.parts))
        assert own is not None, f"{path} has no layer: add it to LAYERS"
        for name in imports(path):
            level = layer_of(name)
            assert level is None or level <= own, f"{path} imports {name} from above"


def test_no_stage_imports_another():
    for path in sources("ddtree_jax/stages"):
        found = {name for name in imports(path) if name.startswith("ddtree_jax.stages")}
        assert not found, f"{path} imports {found}"


def test_only_llm_reaches_convert_and_transformers():
    for path in sources("ddtree_jax"):
        used = {top(name) for name in imports(path)} & {"convert", "transformers"}
        assert not used or path.stem == "llm", f"{path} imports {used}"


def test_convert_sees_config_models_and_checkpoint_only():
    allowed = ("ddtree_jax.config", "ddtree_jax.models", "ddtree_jax.checkpoint")
    for path in sources("convert"):
        for name in imports(path):
            if top(name) == "ddtree_jax" and name != "ddtree_jax":
                assert name.startswith(allowed), f"{path} imports {name}"


def test_scripts_use_public_names():
    public = {"ddtree_jax", "pallas_kernels", "convert"}
    for path in sources("scripts"):
        for name in imports(path):
            private = any(part.startswith("_") and part != "__future__" for part in name.split("."))
            assert not (top(name) in public and private), f"{path} imports {name}"
