"""Compiled kernels that a process keeps in CuPy's cache for later ones."""

import logging
from types import SimpleNamespace

import pytest

from mpikv.compute.cuda import loading
from mpikv.compute.cuda.images import compiled_image


def test_the_compiler_is_told_the_given_options_and_no_others():
    """CuPy's RawModule adds ``-ftz=true``."""
    told = []

    def compile_using_nvrtc(*given, **options):
        told.append((given, options))
        return b"code", {"scale": "_Z5scale"}

    compiler = SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc)  # of which nothing is kept
    cupy = SimpleNamespace(cuda=SimpleNamespace(compiler=compiler))
    assert compiled_image(cupy, "text", loading.OPTIONS, "scale") == (b"code", "_Z5scale")
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
    return SimpleNamespace(of=of, keep_by=keep_by, built=built, folder=tmp_path)


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
        code, name = image()
        assert image() == (code, name)
        assert "encode" in name
        codes.append(code)
        assert code.startswith(b"\x7fELF") is (form == "cubin")
    assert len(set(codes)) == len(cupy.built) == 3
    assert image("decode_add<two_bits>")[0] not in codes
    assert len(list(cupy.folder.iterdir())) == 4


@pytest.mark.deadline(120)
@pytest.mark.parametrize("length", [0, 10, 40, 41, 60, -1])
@pytest.mark.parametrize("changes", [False, True])
def test_a_file_that_is_cut_off_or_has_changed_is_made_anew(cupy, length, changes):
    first = image()
    (path,) = cupy.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:length] + (bytes([whole[length] ^ 1]) + whole[length:][1:] if changes else b""))
    assert image() == image() == first
    assert len(cupy.built) == 2


@pytest.mark.deadline(120)
def test_nothing_is_kept_where_somebody_wants_no_files(cupy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("CUPY_CACHE_IN_MEMORY", "1")
        assert image() == image()
    # Nor in another version of CuPy.
    cupy.keep_by(object())
    assert image() == image()
    assert len(cupy.built) == 4
    assert not list(cupy.folder.iterdir())


@pytest.mark.deadline(120)
def test_a_cache_that_cannot_be_used(cupy, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    caplog.set_level(logging.DEBUG, logger="mpikv")
    cupy.keep_by(SimpleNamespace(load=refuse, save=refuse))
    assert image() == image()
    assert len(cupy.built) == 2
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    for verb in ("load", "save"):
        assert f"CuPy's cache cannot {verb} a compiled kernel: [Errno 13]" in caplog.text


def test_the_names_of_cupy_that_tell_what_it_compiles_for():
    """They are private. Without one of them nothing is kept."""
    compiler = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError).cuda.compiler
    for verb in ("load", "save"):
        assert callable(getattr(compiler._kernel_cache_backend, verb))
    for name in ("_get_arch_for_options_for_nvrtc", "_get_arch", "_preprocess", "_get_bool_env_variable"):
        assert callable(getattr(compiler, name))
