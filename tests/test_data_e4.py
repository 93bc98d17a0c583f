"""The data of the large experiments: CIFAR-10 and GLUE to the last byte, and small generated sets that can be learned."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner, Result

from isaac_lab.commands import data as command
from isaac_lab.data import files as catalogue
from isaac_lab.data import images, text
from isaac_lab.data.files import DataError, File, FileSet

REAL = Path(os.environ.get("ISAAC_DATA") or "/nowhere")


def batch(number: int) -> bytes:
    """Two images: the planes of the first are of one brightness each, the second counts its bytes."""
    planes = b"".join(bytes([number * 10 + plane]) * 1024 for plane in range(3))
    return bytes([number]) + planes + bytes([9]) + bytes(place % 251 for place in range(3072))


COLA = (
    """gj04\t1\t\tA "sentence" it is.\nks08\t0\t*\tIs "it sentence.\ncj99\t1\t\tOne\u2028more.\n""",
    "gj04\t0\t*\tNo line feed ends it.",
)
MRPC_HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
MRPC = (
    MRPC_HEADER + '1\t11\t12\tHe said " yes .\tYes , he said .\n0\t15\t16\tIt rose .\tIt fell .\n',
    MRPC_HEADER + "0\t13\t14\tNo one came .\tAll came .\n",
)
STSB_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
STSB = (
    STSB_HEADER + '0\tnews\ta\t2012\t1\tnone\tnone\tA "plane flies.\tA plane takes off.\t3.800\n',
    STSB_HEADER + "0\tnews\ta\t2012\t2\tnone\tnone\tOne.\tOne.\t5.000\n1\tnews\ta\t2012\t3\tnone\tnone\tOne.\tTwo.\t0.000\n",
)
TEXTS = {"cola": COLA, "mrpc": MRPC, "stsb": STSB}
CONTENT = {"cifar-10": {file.name: batch(number) for number, file in enumerate(catalogue.SETS["cifar-10"].files)}}
CONTENT |= {name: {"train.tsv": train.encode(), "dev.tsv": dev.encode()} for name, (train, dev) in TEXTS.items()}
EXAMPLES = {"cifar-10": (10, 2), "cola": (3, 1), "mrpc": (2, 1), "stsb": (1, 2)}
SUB_FOLDER = {"cifar-10": "cifar-10", "cola": "glue/CoLA", "mrpc": "glue/MRPC", "stsb": "glue/STS-B"}
SOME_FILE = {"cifar-10": "data_batch_3.bin"}
ARCHIVE = "cifar-10-binary.tar.gz"


def small_set(name: str) -> FileSet:
    """The set as it is, with stand-ins for its files."""
    real = catalogue.SETS[name]
    files = tuple(File(file, len(stored), hashlib.md5(stored).hexdigest()) for file, stored in CONTENT[name].items())
    parcels = (replace(real.parcels[0], files=files),)
    return replace(real, examples=EXAMPLES[name], parcels=parcels, mirrors=("http://127.0.0.1:1",))


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sets, and an environment that names no data of the machine."""
    monkeypatch.delenv("ISAAC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("no_proxy", "*")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if "real" not in request.fixturenames:
        stand_ins = {name: small_set(name) for name in CONTENT}
        for module in (catalogue, images, text, command):
            monkeypatch.setattr(module, "SETS", stand_ins)


@pytest.fixture
def real() -> None:
    """Asked for by tests of the sets as they are."""


def put(folder: Path, name: str) -> Path:
    directory = folder / SUB_FOLDER[name]
    directory.mkdir(parents=True, exist_ok=True)
    for file, stored in CONTENT[name].items():
        (directory / file).write_bytes(stored)
    return directory


def packed_tar(content: dict[str, bytes], *, folder: str = "cifar-10-batches-bin/") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, stored in {"readme.html": b"<html>", **content}.items():
            member = tarfile.TarInfo(folder + name)
            member.size = len(stored)
            archive.addfile(member, io.BytesIO(stored))
    return stream.getvalue()


def packed_zip(content: dict[str, bytes], folder: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(f"{folder}/original/raw/in_domain_train.tsv", b"another file")
        for name, stored in content.items():
            archive.writestr(f"{folder}/{name}", stored)
    return stream.getvalue()


#: What is downloaded: the corpus has the line ends of Windows, and rows of both splits in one file.
PUBLISHED = {
    "cifar-10": {ARCHIVE: packed_tar(CONTENT["cifar-10"])},
    "cola": {"CoLA.zip": packed_zip(CONTENT["cola"], "CoLA")},
    "mrpc": {
        "msr_paraphrase_train.txt": (
            MRPC[0][: MRPC[0].index("0\t15")] + MRPC[1].removeprefix(MRPC_HEADER) + MRPC[0][MRPC[0].index("0\t15") :]
        )
        .replace("\n", "\r\n")
        .encode(),
        "mrpc_dev_ids.tsv": b"13\t14\n",
    },
    "stsb": {"STS-B.zip": packed_zip(CONTENT["stsb"], "STS-B")},
}


def load(name: str, folder: Path | None = None) -> images.Images | text.TextTask:
    return images.load(name, folder) if name in images.NAMES else text.load(name, folder)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def left_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_batch_has_a_label_and_three_planes_for_each_image(tmp_path: Path) -> None:
    put(tmp_path, "cifar-10")
    data = images.load("cifar-10", tmp_path)
    assert (data.name, data.title, data.classes) == ("cifar-10", "CIFAR-10", 10)
    assert (data.train.shape, data.test.shape) == ((10, 3, 32, 32), (2, 3, 32, 32))
    assert data.train.dtype == data.test.dtype == torch.uint8
    assert data.train_labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert data.test_labels.tolist() == [5, 9]
    assert data.test[0].flatten(1).unique(dim=1).tolist() == [[50], [51], [52]]
    counting = torch.arange(3072) % 251
    assert torch.equal(data.train[1].flatten().long(), counting)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda stored: stored[:-7],
    "longer": lambda stored: stored + b"!",
    "empty": lambda stored: b"",
    "another byte": lambda stored: stored[:-1] + b"?",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CONTENT)
def test_a_file_that_is_cut_or_changed_is_refused_by_name(name: str, change: str, tmp_path: Path) -> None:
    path = put(tmp_path, name) / SOME_FILE.get(name, "dev.tsv")
    path.write_bytes(CHANGES[change](path.read_bytes()))
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    assert str(caught.value).startswith(str(path))
    assert f"data fetch {name} --to {tmp_path}`" in str(caught.value)
    result = invoke("verify", "--data", tmp_path)
    assert result.exit_code == 1
    assert re.search(rf"{path.name} .*wrong checksum", result.output)
    assert result.output.count("OK") == len(CONTENT[name]) - 1


@pytest.mark.parametrize("name", CONTENT)
def test_what_is_not_there_says_where_it_belongs(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    for part in (*CONTENT[name], f"{SUB_FOLDER[name]}/", f"isaac-newton data fetch {name}", str(tmp_path)):
        assert part in str(caught.value)
    (put(tmp_path, name) / SOME_FILE.get(name, "dev.tsv")).unlink()
    with pytest.raises(DataError, match=rf"incomplete: no {SOME_FILE.get(name, 'dev.tsv')}, .*--to {tmp_path}`"):
        load(name, tmp_path)
    assert f"1 of {len(CONTENT[name])} missing" in invoke("list", "--data", tmp_path).output


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(DataError, match="colour images 'mnist'; there are cifar-10, toy-images"):
        images.load("mnist")
    with pytest.raises(DataError, match="task on sentences 'sst'; there are cola, mrpc, stsb, toy-cola, toy-mrpc, toy-stsb"):
        text.load("sst")


def test_quotes_are_letters_and_only_line_feeds_end_a_row(tmp_path: Path) -> None:
    for name in TEXTS:
        put(tmp_path, name)
    cola, mrpc, stsb = (text.load(name, tmp_path) for name in TEXTS)
    assert cola.train == text.Split(('A "sentence" it is.', 'Is "it sentence.', "One\u2028more."), None, (1, 0, 1))
    assert cola.dev == text.Split(("No line feed ends it.",), None, (0,))
    assert mrpc.train.first == ('He said " yes .', "It rose .")
    assert mrpc.train.second == ("Yes , he said .", "It fell .")
    assert mrpc.train.labels == (1, 0)
    assert stsb.train == text.Split(('A "plane flies.',), ("A plane takes off.",), (3.8,))
    assert stsb.dev.labels == (5.0, 0.0)
    assert [task.title for task in (cola, mrpc, stsb)] == ["CoLA", "MRPC", "STS-B"]
    assert [task.kind for task in (cola, mrpc, stsb)] == ["acceptability", "paraphrase", "similarity"]
    assert [task.outputs for task in (cola, mrpc, stsb)] == [2, 2, 1]
    assert [task.train.second is not None for task in (cola, mrpc, stsb)] == [False, True, True]
    assert [len(task.train) for task in (cola, mrpc, stsb)] == [3, 2, 1]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address at which a folder can be downloaded from."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *arguments: object) -> None:
            """A client that hangs up, because the file is too long, is no error here."""

    with Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder with all that is published, and its address."""
    folder = tmp_path / "site"
    folder.mkdir()
    for published in PUBLISHED.values():
        for name, stored in published.items():
            (folder / name).write_bytes(stored)
    with serving(folder) as address:
        yield folder, address


def test_all_sets_are_fetched_checked_and_unpacked(site: tuple[Path, str], tmp_path: Path) -> None:
    to = tmp_path / "to"
    result = invoke("fetch", "--from", site[1], "--to", to)
    assert result.exit_code == 0, result.output
    assert result.output.count("fetched from") == 4
    assert left_in(to) == sorted(f"{SUB_FOLDER[name]}/{file}" for name, files in CONTENT.items() for file in files)
    for name in CONTENT:
        assert load(name, to).name == name
    assert invoke("verify", "--data", to).exit_code == 0
    assert invoke("fetch", "--from", site[1], "--to", to).output.count("already there") == 4


def test_the_published_folders_are_those_of_the_mirror(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = catalogue.SETS["mrpc"].parcels[0].parts
    for part in parts:
        target = site[0] / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (site[0] / target.name).rename(target)
    monkeypatch.setitem(command.SETS, "mrpc", replace(small_set("mrpc"), mirrors=(site[1],)))
    result = invoke("fetch", "mrpc", "--to", tmp_path / "to")
    assert result.exit_code == 0, result.output
    assert f"{site[1]}/{parts[0]} with {site[1]}/{parts[1]}" in result.output
    assert text.load("mrpc", tmp_path / "to").dev.first == ("No one came .",)


def test_glue_is_one_choice(site: tuple[Path, str], tmp_path: Path) -> None:
    assert invoke("fetch", "glue", "--from", site[1], "--to", tmp_path / "to").exit_code == 0
    assert {Path(file).parts[0] for file in left_in(tmp_path / "to")} == {"glue"}


def test_only_what_is_wrong_is_replaced(site: tuple[Path, str], tmp_path: Path) -> None:
    directory = put(tmp_path, "cifar-10")
    # The compressed one is read first, so that it would hide the new one.
    (directory / "data_batch_3.bin.gz").write_bytes(b"corrupt")
    (directory / "test_batch.bin").write_bytes(b"corrupt")
    before = {path.name: path.stat().st_ino for path in directory.iterdir()}
    result = invoke("fetch", "cifar-10", "--from", site[1], "--to", tmp_path)
    assert result.exit_code == 0, result.output
    after = {path.name: path.stat().st_ino for path in directory.iterdir()}
    assert sorted(after) == sorted(CONTENT["cifar-10"])
    assert {name for name in after if after[name] != before[name]} == {"data_batch_3.bin", "test_batch.bin"}
    assert len(images.load("cifar-10", tmp_path).train) == 10


DOWNLOADS = {
    ("cifar-10", ARCHIVE): {
        b"<html>": "corrupt: expected a tar.gz archive",
        b"": "corrupt: expected a tar.gz archive",
        PUBLISHED["cifar-10"][ARCHIVE][:200]: "corrupt: expected a tar.gz archive",
        gzip.compress(b"<html>" * 200): "corrupt: expected a tar.gz archive",
        packed_tar({name: stored for name, stored in CONTENT["cifar-10"].items() if name != "test_batch.bin"}): (
            "incomplete: expected in it test_batch.bin"
        ),
        packed_tar({}): "incomplete: expected in it data_batch_1.bin, .*test_batch.bin",
        packed_tar(CONTENT["cifar-10"] | {"test_batch.bin": b"?" + CONTENT["cifar-10"]["test_batch.bin"][1:]}): (
            "test_batch.bin in http.* has a wrong checksum"
        ),
        bytes(2 << 20): "too long: expected at most",
    },
    ("cola", "CoLA.zip"): {
        b"<html>": "corrupt: expected a zip archive",
        PUBLISHED["cola"]["CoLA.zip"][:-30]: "corrupt: expected a zip archive",
        packed_zip({}, "CoLA"): "incomplete: expected in it train.tsv, dev.tsv",
        packed_zip(CONTENT["stsb"], "CoLA"): "train.tsv in http.* has a wrong checksum",
    },
    ("mrpc", "msr_paraphrase_train.txt"): {
        b"<html>\n<body>": "train.tsv in http.* has a wrong checksum",
        b"\xff\xfe": "corrupt: expected UTF-8",
        b"": "train.tsv in http.* has a wrong checksum",
    },
}


@pytest.mark.parametrize(
    ("name", "file", "stored"), [(*which, stored) for which, faults in DOWNLOADS.items() for stored in faults], ids=lambda _: ""
)
def test_a_bad_download_is_refused_and_leaves_nothing(
    name: str, file: str, stored: bytes, site: tuple[Path, str], tmp_path: Path
) -> None:
    (site[0] / file).write_bytes(stored)
    result = invoke("fetch", name, "--from", site[1], "--to", tmp_path / "to")
    assert result.exit_code == 1
    assert re.search(f"Error: cannot fetch {name}/{file}: .*{DOWNLOADS[name, file][stored]}", result.output)
    assert not (tmp_path / "to").exists()


def test_without_a_network_one_line_says_so(tmp_path: Path) -> None:
    result = invoke("fetch", "glue", "--to", tmp_path)
    assert result.exit_code == 1
    assert result.output == ("Error: cannot fetch cola/CoLA.zip: http://127.0.0.1:1/glue/data/CoLA.zip: Connection refused\n")
    assert list(tmp_path.iterdir()) == []


def test_list_has_what_consists_of_files_and_what_is_generated(tmp_path: Path) -> None:
    put(tmp_path, "cifar-10"), put(tmp_path, "stsb")
    output = invoke("list", "--data", tmp_path).output
    assert re.search(r"cifar-10 +10 +2 +3 × 32 × 32 +the folder given", output)
    assert re.search(r"stsb +1 +2 +pair +the folder given", output)
    assert re.search(r"mrpc +2 +1 +pair +isaac-newton data fetch mrpc", output)
    for name, made in catalogue.GENERATED.items():
        assert re.search(rf"{name} +{made.examples[0]:,} +{made.examples[1]:,} +{made.example} +generated", output)


def test_sentences_do_not_wait_for_torch() -> None:
    program = "import sys, isaac_lab.data.text; print({'torch', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "set()"


@pytest.mark.parametrize("name", catalogue.GENERATED)
def test_what_is_generated_is_the_same_every_time_and_says_what_it_is(name: str, tmp_path: Path) -> None:
    data = load(name, tmp_path / "nowhere")
    sizes = (len(data.train), len(data.test if isinstance(data, images.Images) else data.dev))
    assert sizes == catalogue.GENERATED[name].examples
    assert data.title == f"{name} (generated)"
    assert data.checksum == load(name).checksum


def test_another_seed_gives_other_data() -> None:
    assert not torch.equal(images.generate(20)[0], images.generate(20, seed=1)[0])
    assert text.generate("paraphrase", 20) != text.generate("paraphrase", 20, seed=1)


def normalized(values: Tensor, data: images.Images) -> Tensor:
    mean, std = (torch.tensor(each)[:, None, None] for each in (data.mean, data.std))
    return (values / 255 - mean) / std


def accuracy(network: nn.Module, data: images.Images, *, rate: float, epochs: int) -> float:
    train, test = normalized(data.train, data), normalized(data.test, data)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(train)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(network(train[chosen]), data.train_labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((network(test).argmax(1) == data.test_labels).float().mean())


def test_toy_images_are_for_convolutions() -> None:
    data = images.load("toy-images")
    assert data.train_labels.unique().tolist() == data.test_labels.unique().tolist() == list(range(10))
    scaled = normalized(data.train, data)
    assert scaled.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-3)
    assert scaled.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    convolutions = nn.Sequential(
        *(nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    assert accuracy(linear, data, rate=1e-3, epochs=2) < 0.4
    assert accuracy(convolutions, data, rate=3e-3, epochs=4) > 0.6


def things(sentence: str) -> Counter[tuple[str, str]]:
    """What a sentence tells of, whichever of the two words is used and in whichever order."""
    known = {word: words for slot in text.SLOTS for words in slot for word in words}
    return Counter(known[word] for word in sentence.split() if word in known)


def test_toy_sentences_are_of_a_grammar_and_the_others_are_not() -> None:
    one_of = ["|".join(word for words in slot for word in words) for slot in text.SLOTS]
    told, where = "the ({}) ({}) ({}) the ({})".format(*one_of[:4]), f"near the ({one_of[4]})"
    grammar = re.compile(rf"{told} {where} \.|{where} {told} \.")
    task = text.load("toy-cola")
    for split in (task.train, task.dev):
        assert [int(grammar.fullmatch(sentence) is not None) for sentence in split.first] == list(split.labels)
    assert Counter(task.train.labels + task.dev.labels) == {0: 300, 1: 300}


def test_toy_pairs_mean_the_same_or_agree_in_as_many_things_as_the_score_says() -> None:
    paraphrases, similar = text.load("toy-mrpc"), text.load("toy-stsb")
    for split in (paraphrases.train, paraphrases.dev, similar.train, similar.dev):
        assert split.second is not None
        agree = [(things(first) & things(second)).total() for first, second in zip(split.first, split.second, strict=True)]
        expected = [int(common == 5) for common in agree] if split in (paraphrases.train, paraphrases.dev) else agree
        assert expected == list(split.labels)
    assert all(type(label) is int for label in paraphrases.train.labels)
    assert all(type(label) is float for label in similar.train.labels)
    assert Counter(similar.train.labels + similar.dev.labels) == dict.fromkeys(map(float, range(6)), 100)


@pytest.mark.parametrize("name", ["toy-cola", "toy-mrpc", "toy-stsb"])
def test_no_toy_example_is_in_both_splits(name: str) -> None:
    task = text.load(name)
    train, dev = (set(zip(split.first, split.second or ("",) * len(split), strict=True)) for split in (task.train, task.dev))
    assert (len(train), len(dev)) == (400, 200)
    assert not train & dev
    words = {word for pair in train | dev for sentence in pair for word in sentence.split()}
    assert words == {*text.WORDS, "."}


def found(name: str) -> bool:
    return catalogue.find(name, catalogue.Place("ISAAC_DATA", REAL)) is not None


@pytest.mark.skipif(not found("cifar-10"), reason="ISAAC_DATA names no folder with CIFAR-10")
def test_the_real_images_are_those_of_the_paper(real: None) -> None:
    data = images.load("cifar-10", REAL)
    assert (data.train.shape, data.test.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert data.train_labels.bincount().tolist() == [5_000] * 10
    assert data.test_labels.bincount().tolist() == [1_000] * 10
    brightness = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(3):
        share = data.train[:, channel].flatten().int().bincount(minlength=256) / (50_000 * 1024)
        mean = (share * brightness).sum()
        assert data.mean[channel] == pytest.approx(mean.item(), abs=1e-5)
        assert data.std[channel] == pytest.approx((share * (brightness - mean) ** 2).sum().sqrt().item(), abs=1e-5)


REAL_TASKS = {
    "cola": (8_551, 1_043, "Our friends won't buy this analysis, let alone the next one we propose.", 721),
    "mrpc": (3_668, 408, 'Amrozi accused his brother , whom he called " the witness " , of deliberately', 279),
    "stsb": (5_749, 1_500, "A plane is taking off.", None),
}


@pytest.mark.skipif(not all(map(found, REAL_TASKS)), reason="ISAAC_DATA names no folder with GLUE")
@pytest.mark.parametrize("name", REAL_TASKS)
def test_the_real_tasks_are_those_of_the_paper(name: str, real: None) -> None:
    training, dev, first, ones = REAL_TASKS[name]
    task = text.load(name, REAL)
    assert (len(task.train), len(task.dev)) == (training, dev)
    assert task.train.first[0].startswith(first)
    if ones is None:
        assert (min(task.dev.labels), max(task.dev.labels)) == (0, 5)
    else:
        assert sum(task.dev.labels) == ones


@pytest.mark.skipif(not found("mrpc"), reason="ISAAC_DATA names no folder with MRPC")
def test_the_real_mrpc_can_be_put_together_from_the_corpus(real: None, tmp_path: Path) -> None:
    """The corpus itself is not at hand: its rows are those of both files."""
    train, dev = ((REAL / "glue" / "MRPC" / f"{split}.tsv").read_text(encoding="utf-8") for split in ("train", "dev"))
    header, rows = dev.split("\n", 1)
    ids = "\n".join("\t".join(row.split("\t")[1:3]) for row in rows.splitlines())
    site = tmp_path / "site"
    site.mkdir()
    (site / "msr_paraphrase_train.txt").write_bytes(f"{train}{rows}".replace("\n", "\r\n").encode())
    (site / "mrpc_dev_ids.tsv").write_bytes(ids.encode())
    with serving(site) as address:
        result = invoke("fetch", "mrpc", "--from", address, "--to", tmp_path / "to")
    assert result.exit_code == 0, result.output
    assert header.startswith("\ufeffQuality")
    assert len(text.load("mrpc", tmp_path / "to").dev) == 408
