"""The data: read from where it was said to be, checked to the last byte, fetched whole or not at all."""

import gzip
import hashlib
import http.server
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from isaac_lab.commands import data as command
from isaac_lab.data import download, sets
from isaac_lab.data import files as catalogue
from isaac_lab.data.files import DataError, File, FileSet
from isaac_lab.data.sets import load

REAL = os.environ.get("ISAAC_DATA")
SHAPES = {"train-images-idx3-ubyte": (6, 3, 3), "train-labels-idx1-ubyte": (6,), "t10k-images-idx3-ubyte": (4, 3, 3)}
SHAPES |= {"t10k-labels-idx1-ubyte": (4,)}
TRAIN_IMAGES = "train-images-idx3-ubyte"


def idx_bytes(shape: tuple[int, ...], values: bytes, *, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape) + values


def content(name: str, file: str) -> bytes:
    """Bytes of a small stand-in for a file; those of the two sets differ."""
    start = {"mnist": 0, "fashion-mnist": 5}[name]
    top = 256 if "images" in file else 10
    return idx_bytes(SHAPES[file], bytes((start + 51 * number) % top for number in range(math.prod(SHAPES[file]))))


CONTENT = {name: {file: content(name, file) for file in SHAPES} for name in ("mnist", "fashion-mnist")}


def small_set(name: str) -> FileSet:
    """The set as it is, with stand-ins for its files."""
    real = catalogue.SETS[name]
    files = (File(file, len(stored), hashlib.md5(stored).hexdigest()) for file, stored in CONTENT[name].items())
    parcels = tuple(replace(parcel, files=(file,)) for parcel, file in zip(real.parcels, files, strict=True))
    mirrors = ("http://127.0.0.1:1/nothing",)
    return replace(real, examples=(6, 4), example="3 × 3", parcels=parcels, mirrors=mirrors)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sets, and an environment that names no data of the machine."""
    monkeypatch.delenv("ISAAC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    if "real" not in request.fixturenames:
        stand_ins = {name: small_set(name) for name in CONTENT}
        for module in (catalogue, sets, command):
            monkeypatch.setattr(module, "SETS", stand_ins)


@pytest.fixture
def real() -> None:
    """Asked for by tests of the sets as they are."""


def put(directory: Path, name: str = "mnist", *, packed: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file, stored in CONTENT[name].items():
        (directory / (f"{file}.gz" if packed else file)).write_bytes(gzip.compress(stored) if packed else stored)
    return directory


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def left_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


GZ = sorted(f"{file}.gz" for file in SHAPES)


@pytest.mark.parametrize("packed", [True, False])
def test_images_are_rows_of_numbers_from_zero_to_one(tmp_path: Path, packed: bool) -> None:
    put(tmp_path / "mnist", packed=packed)
    data = load("mnist", tmp_path)
    assert (data.name, data.classes) == ("mnist", 10)
    assert data.train_images.dtype == data.test_images.dtype == torch.float32
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert (data.train_images.shape, data.test_images.shape) == ((6, 9), (4, 9))
    assert data.train_images[0, :6].tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_checksum_is_that_of_the_data_however_it_is_stored(tmp_path: Path) -> None:
    put(tmp_path / "packed" / "mnist"), put(tmp_path / "plain" / "mnist", packed=False)
    put(tmp_path / "packed" / "fashion-mnist", "fashion-mnist")
    packed, plain = load("mnist", tmp_path / "packed"), load("mnist", tmp_path / "plain")
    assert packed.checksum == plain.checksum
    assert load("fashion-mnist", tmp_path / "packed").checksum != packed.checksum


def test_the_folder_given_comes_before_the_variable_and_that_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, variable, cache = tmp_path / "given", tmp_path / "variable", tmp_path / "xdg" / "isaac-newton"
    monkeypatch.setenv("ISAAC_DATA", str(variable))
    for folder in (given, variable, cache):
        (put(folder / "mnist") / f"{TRAIN_IMAGES}.gz").write_bytes(b"")
    # Each is corrupt, so the error says which one was read.
    for folder, option in ((given, given), (variable, None)):
        with pytest.raises(DataError, match=re.escape(str(folder / "mnist" / TRAIN_IMAGES))):
            load("mnist", option)
    monkeypatch.delenv("ISAAC_DATA")
    with pytest.raises(DataError, match=re.escape(str(cache / "mnist" / TRAIN_IMAGES))):
        load("mnist")


def test_a_folder_without_the_set_leaves_it_to_the_next_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "given" / "mnist"), put(tmp_path / "variable" / "fashion-mnist", "fashion-mnist")
    monkeypatch.setenv("ISAAC_DATA", str(tmp_path / "variable"))
    assert load("fashion-mnist", tmp_path / "given").name == "fashion-mnist"


def test_files_of_the_other_set_are_not_mistaken(tmp_path: Path) -> None:
    put(tmp_path / "fashion-mnist", "fashion-mnist")
    assert load("fashion-mnist", tmp_path).name == "fashion-mnist"
    with pytest.raises(DataError, match="mnist is not in the folder given"):
        load("mnist", tmp_path)
    put(tmp_path / "mnist", "fashion-mnist")
    with pytest.raises(DataError, match="wrong checksum"):
        load("mnist", tmp_path)


def test_the_cache_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert catalogue.cache() == tmp_path / "xdg" / "isaac-newton"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert catalogue.cache() == tmp_path / ".cache" / "isaac-newton"


def test_data_that_is_nowhere_says_where_it_was_looked_for_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISAAC_DATA", str(tmp_path / "variable"))
    for folder in ("given", "variable"):
        (tmp_path / folder).mkdir()
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path / "given")
    message = str(caught.value)
    for part in (
        *SHAPES,
        "given",
        f"ISAAC_DATA ({tmp_path / 'variable'})",
        str(catalogue.cache()),
        "isaac-newton data fetch mnist",
    ):
        assert part in message
    assert "\n" not in message


def test_a_named_folder_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(catalogue.cache() / "mnist")
    with pytest.raises(DataError, match=r"the folder given is not a directory.*nowhere"):
        load("mnist", tmp_path / "nowhere")
    monkeypatch.setenv("ISAAC_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"ISAAC_DATA is not a directory.*nowhere"):
        load("mnist")


def test_an_incomplete_set_names_what_is_missing_and_the_command(tmp_path: Path) -> None:
    (put(tmp_path / "mnist") / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=rf"incomplete: no t10k-labels-idx1-ubyte, .*data fetch mnist --to {tmp_path}`"):
        load("mnist", tmp_path)


def test_an_unknown_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(DataError, match="no data set 'cifar'; there are mnist, fashion-mnist, digits"):
        load("cifar")


GOOD = CONTENT["mnist"][TRAIN_IMAGES]
SIZE, NOTHING = len(GOOD), hashlib.md5(b"").hexdigest()
CORRUPT = {
    "empty gzip": (gzip.compress(b""), f"wrong checksum: 0 bytes with MD5 {NOTHING}, expected {SIZE} bytes"),
    "empty": (b"", f"wrong checksum: 0 bytes with MD5 {NOTHING}, expected {SIZE} bytes"),
    "cut": (gzip.compress(GOOD)[:-9], "cut off: expected a whole gzip file"),
    "no gzip": (b"<html>", "corrupt: expected a gzip file, but: Not a gzipped file"),
    "changed gzip": (gzip.compress(GOOD)[:-8] + bytes(8), "corrupt: expected a gzip file, but: CRC check failed"),
    "not idx": (gzip.compress(b"<html>"), f"wrong checksum: 6 bytes with MD5 .*, expected {SIZE} bytes"),
    "floats": (gzip.compress(idx_bytes((2,), bytes(8), kind=13)), "wrong checksum: 16 bytes"),
    "cut header": (gzip.compress(GOOD[:9]), f"wrong checksum: 9 bytes with MD5 .*, expected {SIZE} bytes"),
    "short": (gzip.compress(GOOD[:-1]), f"wrong checksum: {SIZE - 1} bytes with MD5 .*, expected {SIZE} bytes"),
    "long": (gzip.compress(GOOD + b"more"), f"wrong checksum: more than {SIZE} bytes with MD5"),
    "other shape": (gzip.compress(idx_bytes((3, 2, 3), bytes(18))), f"wrong checksum: 34 bytes .*, expected {SIZE} bytes"),
    "other pixel": (
        gzip.compress(GOOD[:-1] + b"!"),
        f"{SIZE} bytes with MD5 .*, expected {SIZE} .* {hashlib.md5(GOOD).hexdigest()}",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_named_with_what_was_expected_and_found(case: str, tmp_path: Path) -> None:
    stored, message = CORRUPT[case]
    path = put(tmp_path / "mnist") / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(stored)
    if case == "empty":
        path.unlink()
        path = path.with_suffix("")
        path.write_bytes(stored)
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(caught.value).startswith(str(path))
    assert f"data fetch mnist --to {tmp_path}`" in str(caught.value)
    result = invoke("verify", "--data", tmp_path)
    assert result.exit_code == 1
    assert re.search(rf"{path.name} .*(corrupt|wrong checksum)", result.output)
    assert result.output.count("OK") == 3


@given(shape=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_decoding_gives_back_what_was_encoded(shape: list[int], data: st.DataObject) -> None:
    size = torch.Size(shape).numel()
    values = data.draw(st.binary(min_size=size, max_size=size))
    decoded = sets.decode(idx_bytes(tuple(shape), values))
    assert decoded.dtype == torch.uint8
    assert decoded.shape == tuple(shape)
    assert bytes(decoded.flatten().tolist()) == values


def test_the_digits_are_a_data_set_too_and_need_no_folder(tmp_path: Path) -> None:
    data = load("digits", tmp_path / "nowhere")
    assert (data.name, data.classes) == ("digits", 10)
    assert (data.train_images.shape, data.test_images.shape) == ((1440, 64), (357, 64))
    assert data.train_images.dtype == torch.float32
    assert data.train_labels.dtype == torch.int64
    assert data.checksum == load("digits").checksum
    row = next(line for line in invoke("list").output.splitlines() if "digits" in line)
    assert row.split()[:6] == ["digits", "1,440", "357", "8", "×", "8"]


def test_without_scikit_learn_the_digits_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"scikit-learn, which is not installed: pip install 'isaac-newton\[lab\]'"):
        load("digits")


@dataclass
class Server:
    """Serves what is in `files`; counts what it was asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    #: Bytes that are announced and never sent.
    withheld: int = 0

    def offer(self, prefix: str, name: str) -> None:
        self.files |= {f"{prefix}/{file}.gz": gzip.compress(stored) for file, stored in CONTENT[name].items()}


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            if self.path not in served.files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(served.files[self.path]) + served.withheld))
            self.end_headers()
            self.wfile.write(served.files[self.path])

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        served.address = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        running.shutdown()
        thread.join()


def test_fetched_data_is_found_in_the_cache(server: Server) -> None:
    server.offer("/here", "mnist")
    result = invoke("fetch", "mnist", "--from", f"{server.address}/here/")
    assert result.exit_code == 0, result.output
    assert result.output.count("fetched from") == 4
    assert left_in(catalogue.cache()) == [f"mnist/{file}" for file in GZ]
    assert load("mnist").name == "mnist"
    assert invoke("verify", "mnist").output.count("OK") == 4


def test_both_sets_are_fetched_from_sub_folders_by_default(server: Server, tmp_path: Path) -> None:
    server.offer("/mnist", "mnist")
    server.offer("/fashion-mnist", "fashion-mnist")
    result = invoke("fetch", "--from", server.address, "--to", tmp_path / "to")
    assert result.exit_code == 0, result.output
    assert f"ISAAC_DATA={tmp_path / 'to'}" in result.output
    for name in CONTENT:
        assert load(name, tmp_path / "to").name == name


def test_what_is_there_and_right_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    server.offer("", "mnist")
    (put(tmp_path / "mnist") / f"{TRAIN_IMAGES}.gz").write_bytes(b"corrupt")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    result = invoke("fetch", "mnist", "--from", server.address, "--to", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("already there") == 2
    assert {path.rpartition("/")[2] for path in server.asked} == {f"{TRAIN_IMAGES}.gz", "t10k-labels-idx1-ubyte.gz"}
    assert load("mnist", tmp_path).name == "mnist"
    server.asked.clear()
    assert invoke("fetch", "mnist", "--from", server.address, "--to", tmp_path).output.count("already there") == 4
    assert server.asked == []


def wrong_bytes(server: Server) -> None:
    server.files[f"/{TRAIN_IMAGES}.gz"] = gzip.compress(GOOD[:-1] + b"!")


def half_a_file(server: Server) -> None:
    server.files[f"/{TRAIN_IMAGES}.gz"] = server.files[f"/{TRAIN_IMAGES}.gz"][:20]


def connection_lost(server: Server) -> None:
    server.withheld = 10


def a_web_page(server: Server) -> None:
    server.files[f"/{TRAIN_IMAGES}.gz"] = b"<html>"


def too_much(server: Server) -> None:
    server.files[f"/{TRAIN_IMAGES}.gz"] = bytes(1 << 17)


def nothing(server: Server) -> None:
    server.files.clear()


FAULTS = {
    wrong_bytes: f"wrong checksum: {SIZE} bytes with MD5",
    half_a_file: "cut off: expected a whole gzip file",
    connection_lost: "cut off: .* bytes received, expected",
    a_web_page: "corrupt: expected a gzip file",
    too_much: "too long: expected at most",
    nothing: "the server answers 404",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("before", [None, b"what was there before"])
def test_a_bad_download_is_refused_and_leaves_nothing(
    fault: Callable[[Server], None], before: bytes | None, server: Server, tmp_path: Path
) -> None:
    server.offer("", "mnist")
    fault(server)
    existing = tmp_path / "to" / "mnist" / f"{TRAIN_IMAGES}.gz"
    if before:
        existing.parent.mkdir(parents=True)
        existing.write_bytes(before)
    result = invoke("fetch", "mnist", "--from", server.address, "--to", tmp_path / "to")
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert re.search(f"Error: cannot fetch mnist/{TRAIN_IMAGES}.gz: .*{FAULTS[fault]}", result.output)
    if before:
        assert left_in(tmp_path) == [str(existing.relative_to(tmp_path))]
        assert existing.read_bytes() == before
    else:
        assert list(tmp_path.iterdir()) == []


def test_the_next_mirror_is_asked_when_one_fails(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.offer("/good", "mnist")
    server.files |= {f"/bad/{file}.gz": b"<html>" for file in SHAPES}
    mirrors = ("http://127.0.0.1:1", f"{server.address}/bad", f"{server.address}/good")
    monkeypatch.setitem(command.SETS, "mnist", replace(small_set("mnist"), mirrors=mirrors))
    result = invoke("fetch", "mnist")
    assert result.exit_code == 0, result.output
    assert result.output.count(f"fetched from {server.address}/good/") == 4


def test_without_a_network_one_line_says_so(tmp_path: Path) -> None:
    result = invoke("fetch", "--to", tmp_path)
    assert result.exit_code == 1
    assert result.output == (
        f"Error: cannot fetch mnist/{TRAIN_IMAGES}.gz: http://127.0.0.1:1/nothing/{TRAIN_IMAGES}.gz: Connection refused\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = invoke("fetch", "--from", f"http://127.0.0.1:{silent.getsockname()[1]}", "--to", tmp_path)
    assert result.exit_code == 1
    assert "timed out" in result.output


@pytest.mark.parametrize("address", ["file:///etc", "127.0.0.1:8000"])
def test_only_web_addresses_are_fetched_from(address: str) -> None:
    result = invoke("fetch", "--from", address)
    assert result.exit_code == 2
    assert "must begin with http:// or https://" in result.output


def test_a_folder_that_cannot_be_written_is_refused_before_the_download(server: Server, tmp_path: Path) -> None:
    server.offer("", "mnist")
    (tmp_path / "file").touch()
    result = invoke("fetch", "--from", server.address, "--to", tmp_path / "file" / "folder")
    assert result.exit_code == 2
    assert "cannot write to" in result.output
    assert server.asked == []


def test_a_write_that_fails_leaves_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    server.offer("", "mnist")
    result = invoke("fetch", "mnist", "--from", server.address, "--to", tmp_path)
    assert result.exit_code == 2
    assert "No space left on device" in result.output
    assert left_in(tmp_path) == []


def test_verify_fails_for_what_is_incomplete_or_was_asked_for_by_name(tmp_path: Path) -> None:
    assert invoke("verify", "--data", tmp_path).exit_code == 0
    assert invoke("verify", "mnist", "--data", tmp_path).exit_code == 1
    put(tmp_path / "mnist")
    result = invoke("verify", "--data", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("OK") == 4
    assert "fashion-mnist: not found" in result.output
    (tmp_path / "mnist" / f"{TRAIN_IMAGES}.gz").unlink()
    result = invoke("verify", "--data", tmp_path)
    assert result.exit_code == 1
    assert re.search(rf"{TRAIN_IMAGES} .*missing", result.output)


def test_list_says_where_each_set_is_or_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISAAC_DATA", str(tmp_path))
    put(tmp_path / "mnist")
    result = invoke("list")
    assert result.exit_code == 0
    assert re.search(r"mnist +6 +4 +3 × 3 +ISAAC_DATA", result.output)
    assert re.search(r"fashion-mnist +6 +4 +3 × 3 +isaac-newton data fetch fashion-mnist", result.output)
    assert f"ISAAC_DATA: {tmp_path}" in result.output


@pytest.mark.parametrize("arguments", [["list"], ["verify"]])
def test_a_folder_that_is_not_there_is_refused(arguments: list[str], tmp_path: Path) -> None:
    result = invoke(*arguments, "--data", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "is not a directory" in result.output


def test_the_commands_do_not_wait_for_torch() -> None:
    program = "import sys, isaac_lab.commands.data; print({'torch', 'sklearn', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "set()"


def test_the_choices_are_the_sets(real: None) -> None:
    known = ("mnist", "fashion-mnist", "cifar-10", "cola", "mrpc", "stsb", "diamonds")
    assert command.names("all") == tuple(catalogue.SETS) == known
    assert command.names("glue") == ("cola", "mrpc", "stsb")
    assert command.names("cifar-10") == ("cifar-10",)
    assert set(get_args(command.Choice)) == {*catalogue.SETS, "glue", "all"}
    assert sets.NAMES == ("mnist", "fashion-mnist", "digits")
    assert [file.size for file in catalogue.SETS["mnist"].files] == [47_040_016, 60_008, 7_840_016, 10_008]


@pytest.mark.skipif(not REAL, reason="ISAAC_DATA names no folder with MNIST and Fashion-MNIST")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_sets_are_what_the_paper_trains_on(name: str, real: None) -> None:
    started = time.perf_counter()
    data = load(name, Path(str(REAL)))
    assert time.perf_counter() - started < 3
    assert (data.train_images.shape, data.test_images.shape) == ((60_000, 784), (10_000, 784))
    assert (data.train_images.min(), data.train_images.max()) == (0, 1)
    mean = {"mnist": 0.1307, "fashion-mnist": 0.2860}[name]
    assert data.train_images.mean().item() == pytest.approx(mean, abs=1e-4)
    assert data.test_labels.unique().tolist() == list(range(10))
