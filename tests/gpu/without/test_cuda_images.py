"""Compiled kernels that a process keeps on disk for later ones, with a compiler that counts, and with CuPy's."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpikv.compute.cuda import images, loading
from mpikv.compute.cuda.images import Image, cached_image, compiled_image

ROOT = Path(__file__).parents[3]
FACTS = ("14.2", "-arch=sm_90", "cubin", "V13.5.37", "-std=c++17", "scale<float>", "source")


class Compiler:
    """Builds another image each time."""

    def __init__(self) -> None:
        self.built: list[Image] = []

    def __call__(self) -> Image:
        self.built.append(Image(b"\x7fELF\0" + bytes([len(self.built)]) * 100, "_Z5scale"))
        return self.built[-1]


def test_a_later_process_compiles_nothing(tmp_path):
    first, later = Compiler(), Compiler()
    folder = tmp_path / "not yet" / "there"
    image = cached_image(folder, FACTS, first)
    assert cached_image(folder, FACTS, later) == image == first.built[0]
    assert later.built == []
    assert len(list(folder.iterdir())) == 1


def test_what_is_made_of_something_else_is_another(tmp_path):
    build = Compiler()
    others = [(*FACTS[:place], "other", *FACTS[place + 1 :]) for place in range(len(FACTS))]
    others.append((*FACTS[:-2], FACTS[-2] + FACTS[-1]))  # the same text, cut elsewhere
    found = [cached_image(tmp_path, facts, build) for facts in (FACTS, *others)]
    assert len({image.code for image in found}) == len(build.built) == len(FACTS) + 2
    assert [cached_image(tmp_path, facts, build) for facts in (FACTS, *others)] == found


@pytest.mark.parametrize("length", [0, 10, 32, 33, 60, -1])
@pytest.mark.parametrize("changes", [False, True])
def test_a_file_that_is_cut_off_or_has_changed_is_made_anew(tmp_path, length, changes):
    build = Compiler()
    cached_image(tmp_path, FACTS, build)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:length] + (bytes([whole[length] ^ 1]) + whole[length:][1:] if changes else b""))
    assert cached_image(tmp_path, FACTS, build) == cached_image(tmp_path, FACTS, build) == build.built[1]
    assert len(build.built) == 2


def test_so_is_a_whole_one_of_something_else(tmp_path):
    build = Compiler()
    cached_image(tmp_path, FACTS, build)
    (path,) = tmp_path.iterdir()
    cached_image(tmp_path, ("other",), build)
    (other,) = set(tmp_path.iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    assert cached_image(tmp_path, FACTS, build) is build.built[2]


def refused(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("step", ["folder", "file", "place"])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog, step):
    caplog.set_level(logging.DEBUG, logger="mpikv")
    folder = tmp_path / "cache"
    if step == "folder":
        folder.touch()
    elif step == "file":
        monkeypatch.setattr("tempfile.mkstemp", refused)
    else:
        monkeypatch.setattr(images, "os", SimpleNamespace(fdopen=os.fdopen, unlink=os.unlink, replace=refused))
    build = Compiler()
    assert [cached_image(folder, FACTS, build) for _ in range(2)] == build.built
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert "cannot be kept" in caplog.text
    assert step == "folder" or list(folder.iterdir()) == []  # nothing is left


def test_a_compiler_that_fails_leaves_nothing(tmp_path):
    def fail() -> Image:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        cached_image(tmp_path, FACTS, fail)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from hashlib import sha256
from mpikv.compute.cuda.images import Image, cached_image
folder, own = Path(sys.argv[1]), int(sys.argv[2])
for number in range(200):
    image = cached_image(folder, ("fact", str(number)), lambda: Image(bytes([own]) * 100_000, "name"))
    assert len(set(image.code)) == 1 and len(image.code) == 100_000
    if number % 2:
        (folder / sha256(repr(("fact", str(number))).encode()).hexdigest()).unlink(missing_ok=True)
"""


def test_processes_that_compile_at_once(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path, str(own)], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        for own in (1, 2)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert all(len(path.name) == 64 for path in tmp_path.iterdir())


def test_the_compiler_is_told_the_given_options_and_no_others():
    """CuPy's RawModule adds ``-ftz=true``."""
    told = []

    def compile_using_nvrtc(*given, **options):
        told.append((given, options))
        return b"code", {"scale": "_Z5scale"}

    compiler = SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc)  # of which nothing is kept
    cupy = SimpleNamespace(cuda=SimpleNamespace(compiler=compiler))
    assert compiled_image(cupy, "text", loading.OPTIONS, "scale") == Image(b"code", "_Z5scale")
    assert told == [(("text", loading.OPTIONS), {"name_expressions": ("scale",), "cache_in_memory": True})]


# --- With CuPy


@pytest.fixture
def cupy(tmp_path, monkeypatch):
    """CuPy, for a GPU of one architecture that is not there, with a folder of its own."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    compiler = cupy.cuda.compiler
    try:
        compiler._get_nvrtc_version()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")

    def keep_by(backend):
        monkeypatch.setattr(compiler, "_kernel_cache_backend", backend)

    keep_by(type(compiler._kernel_cache_backend)(str(tmp_path)))
    built = []
    compile_using_nvrtc = compiler.compile_using_nvrtc

    def counted(*arguments, **options):
        built.append(options["name_expressions"])
        return compile_using_nvrtc(*arguments, **options)

    monkeypatch.setattr(compiler, "compile_using_nvrtc", counted)

    def of(architecture, *arch_of_options):
        monkeypatch.setattr(compiler, "_get_arch", lambda: architecture)
        monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: arch_of_options)

    of("90", "-arch=sm_90", "cubin")
    return SimpleNamespace(of=of, keep_by=keep_by, built=built, folder=tmp_path / "mpikv")


def image(expression="encode<two_bits>"):
    import cupy

    return compiled_image(cupy, loading.source_of("codes.cu"), loading.OPTIONS, expression)


@pytest.mark.deadline(120)
def test_images_are_of_an_architecture_and_an_expression(cupy):
    """Machine code for each architecture, or PTX; each is compiled once."""
    codes = []
    for architecture, option, form in (
        ("90", "-arch=sm_90", "cubin"),
        ("80", "-arch=sm_80", "cubin"),
        ("90", "-arch=compute_90", "ptx"),
    ):
        cupy.of(architecture, option, form)
        first = image()
        assert image() == first
        assert "encode" in first.name
        codes.append(first.code)
        assert first.code.startswith(b"\x7fELF") is (form == "cubin")
    assert len(set(codes)) == len(cupy.built) == 3
    assert image("decode_add<two_bits>").code not in codes
    assert len(list(cupy.folder.iterdir())) == 4


@pytest.mark.deadline(120)
def test_nothing_is_kept_where_somebody_wants_no_files(cupy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("CUPY_CACHE_IN_MEMORY", "1")
        assert image() == image()
    # Nor with another kind of cache, or in another version of CuPy.
    cupy.keep_by(object())
    assert image() == image()
    assert len(cupy.built) == 4
    assert not cupy.folder.exists()


def test_the_names_of_cupy_that_tell_what_it_compiles_for():
    """They are private. Without one of them nothing is kept."""
    compiler = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError).cuda.compiler
    assert isinstance(compiler._kernel_cache_backend._cache_dir, str)
    for name in ("_get_arch_for_options_for_nvrtc", "_get_arch", "_preprocess", "_get_bool_env_variable"):
        assert callable(getattr(compiler, name))
