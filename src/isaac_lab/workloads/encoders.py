"""Encoders of Hugging Face's library, from a folder or the hub, and a tiny random one for smoke tests.

Where the encoder is, the environment variable ISAAC_ENCODER says: a local folder or a name on the hub. What it is, a record
says: its name is the variant `model`, and the checksum of its weights stands beside that of the data.
"""

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from isaac_lab.data import text
from isaac_lab.data.files import DataError
from isaac_lab.records import installed

#: The environment variable.
ENCODER = "ISAAC_ENCODER"
#: What the encoder of smoke tests is called.
TINY = "tiny random BERT"
#: Weights that lie in folders of other names, by SHA-256 of model.safetensors.
KNOWN = {"53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db": "all-MiniLM-L6-v2"}
#: Tokens of an example at most: what GLUE is fine-tuned with, and more than nearly all of its sentences and pairs have.
MOST_TOKENS = 128


class EncoderError(DataError):
    """An encoder that cannot be used; the message says why and what would do."""


@dataclass(frozen=True)
class Encoder:
    """A pre-trained network that takes sentences."""

    name: str  # what records and tables call it; no path
    weights: str  # their SHA-256; "" where they are random
    tokenizer: Any
    #: Takes the number of outputs; returns the network with a new, random head (and random weights, if they are).
    build: Callable[[int], nn.Module]


@cache
def encoder(source: str) -> Encoder:
    """The encoder in a folder, or of this name on the hub; an EncoderError says what is `WANTED`."""
    library = _library()
    path = Path(source).expanduser()
    local = path.is_dir()
    if not local and (path.is_absolute() or source.startswith(("~", ".")) or len(path.parts) > 2):
        raise EncoderError(f"there is no folder {source!r}: {WANTED}")
    if local and not (path / "config.json").is_file():
        raise EncoderError(f"{source!r} has no config.json: {WANTED}")
    place = str(path) if local else source
    auto = library.AutoModelForSequenceClassification
    try:
        with quietly():
            config = library.AutoConfig.from_pretrained(place)
            _check(config, source)
            tokenizer = library.AutoTokenizer.from_pretrained(place)
            # Of a name on the hub, the folder that it was downloaded to.
            folder = path if local else Path(library.utils.cached_file(place, "config.json")).parent
            auto.from_pretrained(place)
    except EncoderError:
        raise
    # Those who read weights and tokenizers have errors of their own.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise EncoderError(f"{source!r} cannot be read ({reason}): {WANTED}") from None
    if tokenizer.pad_token is None:
        raise EncoderError(f"{source!r} has a tokenizer without a padding token: {WANTED}")
    weights = _checksum(folder)

    def build(outputs: int) -> nn.Module:
        with quietly():
            made: nn.Module = auto.from_pretrained(folder, num_labels=outputs)
        return made.float()

    return Encoder(KNOWN.get(weights) or (path.resolve() if local else path).name, weights, tokenizer, build)


@cache
def tiny() -> Encoder:
    """Two layers of width 32 with random weights, and the words of the toy tasks as vocabulary."""
    library, tokenizers = _library(), importlib.import_module("tokenizers")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    words = {word: number for number, word in enumerate((*special, ".", *text.WORDS))}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, words[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=rules,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True)),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )

    def build(outputs: int) -> nn.Module:
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = library.BertConfig(
            vocab_size=len(words),
            num_labels=outputs,
            max_position_embeddings=MOST_TOKENS,
            # BERT's own 0.02 is for 768 neurons; with 32 nothing would come through.
            initializer_range=0.15,
            **size,
        )
        made: nn.Module = library.AutoModelForSequenceClassification.from_config(config)
        return made

    return Encoder(TINY, "", tokenizer, build)


WANTED = (
    "--model (or ISAAC_ENCODER) must be a folder with config.json, weights and a tokenizer of an encoder, such as "
    "all-MiniLM-L6-v2 or BERT, or the name of one on the Hugging Face hub, such as google-bert/bert-base-uncased"
)


def _library() -> Any:
    if not installed("transformers"):
        raise EncoderError('encoders need the transformers library: pip install "isaac-newton[encoders]"')
    return importlib.import_module("transformers")


def _check(config: Any, source: str) -> None:
    """Encoders are what can fill in a masked word; what only goes on with a text is none, nor is what translates one."""
    kinds = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = (kinds.MODEL_FOR_MASKED_LM_MAPPING_NAMES, kinds.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    if config.is_encoder_decoder or any(config.model_type not in table for table in tables):
        raise EncoderError(f"{source!r} is a {config.model_type}, not an encoder: {WANTED}")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the report that the head is new, which it is to be, and without bars."""
    logging = importlib.import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _checksum(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
