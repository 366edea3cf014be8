"""From a Hugging Face folder or hub name to a `Decoder` ready to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from ..core.options import did_you_mean, shown
from ..model.attention.base import AttentionBackend
from ..model.decoder import Decoder
from ..model.families import DecoderConfig, decoder_config
from ..model.linear import QUANTS, Quant
from ..model.parallel import Ranks
from . import generation
from .blocks import StoredWeights
from .files import StoredTensor, free_bytes, get_tensor, is_file, is_out_of_memory, opened, read_json, stored_tensors
from .gguf import is_gguf, read_gguf
from .gguf_model import read_gguf_config, read_pieces
from .gguf_tokenizer import load_gguf_tokenizer, load_gguf_vocabulary
from .group_quant import take_groups
from .hub import env_offline, first_line, from_hub, local
from .names import Piece, weight_map
from .stored_blocks import BlockTensor, in_blocks

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_RESTORE = "download or copy the checkpoint again"
_FLOATS = ("BF16", "F16", "F32", "F64")  # types in which weights may be stored


def load_model(
    path: str | Path,
    *,
    attention: AttentionBackend,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    exact: bool = False,
    native: bool = False,
    layers: tuple[int, int] | None = None,
    ends: bool = True,
    ranks: Ranks | None = None,
) -> Decoder:
    """Load the checkpoint in a local folder (`resolve_folder`), or a part of its layers.

    The headers of the weight files are compared with ``config.json``, and the memory that the weights need with what is
    free, before anything is allocated.

    Args:
        dtype: "bfloat16", "float16", "float32", "float64", "int8", "q8_0" or "q4_0" (weights in 8 or 4 bits, bf16
            activations), or "auto" for what the checkpoint is stored in.
        device: "cpu", "cuda" or "cuda:1".
        exact, native: see `Decoder`.
        layers: the first one, and one past the last one; None: all. They are numbered from 0 then.
        ranks: the share of one of several ranks is loaded, and nothing else is read.
        ends: of `DecoderConfig.part`; without them the decoder's embedding and head are zeros, for nobody to use.

    Raises:
        ConfigError: files that are missing, broken or do not fit the configuration, or weights for which there is
            too little memory.
        CapabilityError: a dtype, device or model option that is not available.
    """
    folder = Path(path)
    config = read_config(folder)
    place = parse_device(device)
    kind, quant = parse_dtype(dtype, config)
    layout = read_layout(folder, config)
    if quant == "stored" and not is_gguf(folder) and config.quantised is None:
        wrong = f"{folder} has no weights in blocks"
        raise ConfigError("dtype='stored'", wrong, "name a GGUF file or a checkpoint in 4 bits, or leave it out")
    if layers is not None:
        layout, config = _part(layout, layers, ends), config.part(*layers, ends)
    if ranks is not None:
        layout = layout.cut(ranks.share.cut)
    blocks = layout.blocks(config) if quant == "stored" else {}
    with memory_for(folder, layout, config, kind, place, blocks):
        given: dict[str, Any] = {"exact": exact, "quant": quant, "native": native, "ranks": ranks}
        decoder = Decoder(config, attention, dtype=kind, device=place, **given)
        decoder.allocate(blocks)
        for name, parameter in decoder.named_parameters():
            if ranks is not None and ranks.share.absent(name):
                parameter.data.zero_()
        if not ends:
            for parameter in (decoder.embedding, *(() if decoder.norm is None else decoder.norm.parameters())):
                parameter.data.zero_()
        fill_all(decoder, layout, blocks)
        return decoder.finish(blocks)


def _part(layout: Layout, layers: tuple[int, int], ends: bool) -> Layout:
    """Return the part of a checkpoint that some of the layers need, under the names that they have alone."""
    kept = []
    for piece, tensor in layout.pieces:
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", piece.into)
        if match is None and ends:
            kept.append((piece, tensor))
        elif match is not None and layers[0] <= int(match[1]) < layers[1]:
            kept.append((replace(piece, into=f"layers.{int(match[1]) - layers[0]}.{match[2]}"), tensor))
    return Layout(kept, layout.heads if ends else [])


@contextmanager
def memory_for(
    folder: Path,
    layout: Layout,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    blocks: StoredWeights,
) -> Iterator[None]:
    """Refuse, in words, weights that do not fit: before they are loaded, and where the allocator gives up."""
    count = sum(piece.numel for piece, _ in layout.pieces if piece.into not in blocks)
    # One tensor more: weights are converted and packed one at a time.
    wanted = (count + max(piece.numel for piece, _ in layout.pieces)) * dtype.itemsize + _table_bytes(
        config, dtype, device
    )
    wanted += round(1.1 * sum(tensor.nbytes for own in blocks.values() for tensor in own))
    free = free_bytes(device)
    asked = f"the model in {folder} as {str(dtype).removeprefix('torch.')} on {device}"
    held = count + sum(piece.numel for piece, _ in layout.pieces if piece.into in blocks)
    needs = f"its {held:,} parameters take {wanted / 2**30:.1f} GiB while they are loaded"
    remedy = "use a smaller dtype or model, or free some memory"
    if free is not None and wanted > free:
        raise ConfigError(asked, f"{needs}, and {free / 2**30:.1f} GiB are free", remedy)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(asked, f"{needs}, which is more than this machine has", remedy) from error


def _table_bytes(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of the rotation's table, which covers every position from the start except on the CPU."""
    if device.type == "cpu":
        return 0
    return sum(2 * config.max_position * rope.dim * dtype.itemsize for rope in {*config.rotations} if rope is not None)


def read_config(folder: Path) -> DecoderConfig:
    """Return the decoder's configuration; the end-of-text ids of `generation` precede its own."""
    if is_gguf(folder):
        return read_gguf_config(folder)
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder}", "there is no such folder", "name a Hugging Face model folder")
    values = _read_json(folder / "config.json")
    ends = generation.ends(folder)
    if not ends or not isinstance(values, dict):
        return decoder_config(values)
    return replace(decoder_config({**values, "eos_token_id": None}), eos_ids=ends)


def parse_dtype(dtype: str | torch.dtype, config: DecoderConfig) -> tuple[torch.dtype, Quant | None]:
    """Return the dtype of the activations, and how the weights are quantised."""
    name = check_dtype(dtype)
    if name == "auto":
        name = check_dtype(config.checkpoint_dtype or "float32", "config.json: dtype")
    if name in QUANTS:
        return torch.bfloat16, cast("Quant", name)
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype={name!r}", "there is no such dtype", f"use one of: {', '.join(DTYPES)}")
    return DTYPES[name], None


def check_dtype(dtype: str | torch.dtype, asked: str = "dtype") -> str:
    """Return the name of a dtype, checked.

    Raises:
        ConfigError: there is no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in (*DTYPES, *QUANTS, "auto"):
        known = ", ".join(("auto", *QUANTS, *DTYPES))
        raise ConfigError(f"{asked}={shown(name)}", "no such dtype", f"use one of: {known}")
    return name


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device, checked to be present."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={shown(device)}", "there is no such device", "use 'cpu' or 'cuda'") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={shown(device)}", "the engine runs on 'cpu' and 'cuda' alone", "use 'cpu' or 'cuda'")
    if place.type == "cpu" and place.index:
        raise ConfigError(f"device={shown(device)}", "the CPU is one device", "use 'cpu', and threads=... for cores")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise CapabilityError(f"device={device!r}", found, "use device='cpu', or a CUDA build of torch and a GPU")
    return place


# --- weights --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every parameter in a checkpoint's files; see `read_layout`."""

    pieces: Sequence[tuple[Piece, StoredTensor | BlockTensor]]
    heads: Sequence[StoredTensor] = ()  # stored next to a tied embedding, of which they must be copies

    def cut(self, part: Callable[[Piece], Iterable[Piece]]) -> Layout:
        """Return the part that is read of each tensor, where that is not all."""
        return Layout([(own, tensor) for piece, tensor in self.pieces for own in part(piece)])

    def blocks(self, config: DecoderConfig) -> dict[str, list[BlockTensor]]:
        """Return the parameters that stay in blocks."""
        plain = {piece.into: tensor for piece, tensor in self.pieces if isinstance(tensor, StoredTensor)}
        blocks = [(piece, tensor) for piece, tensor in self.pieces if not isinstance(tensor, StoredTensor)]
        for piece, tensor in blocks:
            if piece.into in plain:
                wrong = f"{plain[piece.into].name}, which is multiplied together with it, is not quantised"
                raise CapabilityError(f"tensor {tensor.name}", wrong, "load it with dtype='bfloat16' or 'int8'")
        return in_blocks(blocks, config)


def read_layout(folder: Path, config: DecoderConfig, layers_only: bool = False) -> Layout:
    """Find every parameter in the headers of the folder's safetensors files; no data is read.

    With ``layers_only`` the files hold the layers alone.

    Raises:
        ConfigError: a file or tensor that is missing, broken, misshaped, there twice or left over.
    """
    if is_gguf(folder):
        return Layout(read_pieces(folder, config))
    wanted = {piece.source: piece for piece in weight_map(config) if piece.of_layer or not layers_only}
    stored = _by_source(stored_tensors(_weight_files(folder), _RESTORE))
    groups = take_groups(config.quantised, {source: piece.shape for source, piece in wanted.items()}, stored)
    pieces: list[tuple[Piece, StoredTensor | BlockTensor]] = []
    for source, tensor in stored.items():
        if source in wanted:
            _check_piece(wanted[source], tensor)
            pieces.append((wanted[source], tensor))
    pieces += [(wanted[source], group) for source, group in groups.items()]
    heads = [tensor for source, tensor in stored.items() if source == "lm_head.weight" and source not in wanted]
    _refuse(folder, "misses", sorted(wanted.keys() - stored.keys() - groups.keys()))
    _refuse(folder, "has unexpected", [stored[s].name for s in stored if s not in wanted and not _is_ignored(s)])
    return Layout(pieces, heads)


def _by_source(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors by name, without the leading "model." that some checkpoints have."""
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        source = tensor.name.removeprefix("model.")
        if source in found:
            places = f"in {found[source].file.name} and in {tensor.file.name}"
            raise ConfigError(f"tensor {source} in {tensor.file.parent}", f"it is there twice, {places}", _RESTORE)
        found[source] = tensor
    return found


def _is_ignored(source: str) -> bool:
    """Return whether a tensor is a head next to a tied embedding, which is compared, or a buffer of old checkpoints."""
    return source == "lm_head.weight" or source.endswith((".rotary_emb.inv_freq", ".masked_bias"))


def _check_piece(piece: Piece, tensor: StoredTensor) -> None:
    asked = f"tensor {piece.source} in {tensor.file}"
    if tensor.dtype not in _FLOATS:
        raise ConfigError(
            asked, f"it is {tensor.dtype}, a quantised weight", "use the original checkpoint, or dtype='int8'"
        )
    if tensor.shape != piece.shape:
        raise ConfigError(
            asked,
            f"its shape is {shown(list(tensor.shape))}, config.json asks for {list(piece.shape)}",
            "use the config.json that belongs to these weights",
        )


def load_weights(decoder: Decoder, folder: Path, layers_only: bool = False) -> None:
    """Fill the decoder's parameters from the folder's safetensors files; arguments and errors as of `read_layout`."""
    fill_all(decoder, read_layout(folder, decoder.config, layers_only))


def fill_all(decoder: Decoder, layout: Layout, blocks: Collection[str] = ()) -> None:
    parameters = {name: value.data for name, value in decoder.named_parameters()}
    for piece, tensor in layout.pieces:
        if not isinstance(tensor, StoredTensor) and piece.into not in blocks:
            _fill(parameters[piece.into], piece, tensor.values())
            tensor.forget()
    stored = [(piece, tensor) for piece, tensor in layout.pieces if isinstance(tensor, StoredTensor)]
    for file in dict.fromkeys(tensor.file for _, tensor in stored):
        with opened(file, _RESTORE) as tensors:
            for piece, tensor in stored:
                if tensor.file == file:
                    _fill(parameters[piece.into], piece, get_tensor(tensors, tensor, _RESTORE, piece.take))
    for head in layout.heads:
        with opened(head.file, _RESTORE) as tensors:
            _check_tied(decoder, get_tensor(tensors, head, _RESTORE), head.file)


def _weight_files(folder: Path) -> list[Path]:
    if is_file(folder / INDEX):
        return _shards(folder)
    if is_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ConfigError(
            f"the weights in {folder}",
            "they are pickle files (.bin, .pt), which can run code when they are read",
            "convert them once with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    raise ConfigError(f"model folder {folder}", f"it has neither {WEIGHTS} nor {INDEX}", _RESTORE)


def _shards(folder: Path) -> list[Path]:
    index = _read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise ConfigError(str(folder / INDEX), "it has no weight_map", _RESTORE)
    shards = sorted(set(names.values()))
    outside = [n for n in shards if Path(n).name != n]
    if outside:
        raise ConfigError(str(folder / INDEX), f"shard {shown(outside[0])} is not in the folder", _RESTORE)
    missing = [n for n in shards if not is_file(folder / n)]
    if missing:
        raise ConfigError(f"model folder {folder}", f"shard {missing[0][:200]} is missing", _RESTORE)
    return [folder / n for n in shards]


def _fill(parameter: Tensor, piece: Piece, tensor: Tensor) -> None:
    rows = parameter if piece.rows is None else parameter[piece.at : piece.at + piece.rows]
    if tensor.shape != rows.shape:  # copy_ would repeat a smaller one
        raise ConfigError(f"tensor {piece.source}", "its file was changed while it was read", "load the model again")
    rows.copy_(tensor)
    if piece.offset:
        rows.add_(piece.offset)


def _check_tied(decoder: Decoder, head: Tensor, file: Path) -> None:
    """Check that a head stored next to a tied embedding is that embedding, or one of the two would be lost."""
    if not torch.equal(head.to(decoder.dtype), decoder.embedding.data.to("cpu")):
        raise ConfigError(
            f"lm_head.weight in {file}",
            "config.json ties the head to the embedding, and the two differ",
            "set tie_word_embeddings to false in config.json",
        )


def _refuse(folder: Path, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"the checkpoint in {folder}",
            f"it {verb} {'tensors' if len(names) > 1 else 'tensor'} {', '.join(names[:3])}{more}",
            "use the config.json that belongs to these weights, or get the whole checkpoint",
        )


def _read_json(file: Path) -> Any:
    if not is_file(file):
        raise ConfigError(f"model folder {file.parent}", f"it has no {file.name}", _RESTORE)
    return read_json(file, _RESTORE)


# --- names and tokenizers -------------------------------------------------------------------------------------


def resolve_folder(name_or_path: str | Path, revision: str | None = None, offline: bool = False) -> Path:
    """Return the folder of a model: an embedded model's name, a local folder, or a hub name.

    A hub name (``org/name``) is downloaded; ``offline``, as HF_HUB_OFFLINE, uses what is cached.

    Raises:
        ConfigError: nothing of that name, or the hub cannot be reached.
    """
    from . import zoo

    if not isinstance(name_or_path, str | Path) or not str(name_or_path).strip() or "\0" in str(name_or_path):
        raise ConfigError(f"model {shown(name_or_path)}", "not a model's name", "name an embedded model or a folder")
    name = str(name_or_path)
    found = zoo.find(name) or local(name)
    if found is None and is_gguf(name):
        raise ConfigError(f"model {shown(name)}", "there is no such file", "check the path")
    if found is None:
        try:
            return from_hub(name, revision, offline or env_offline())
        except ConfigError as error:
            remedy = did_you_mean(name, [entry.name for entry in zoo.available()])
            raise ConfigError(error.asked, error.wrong, remedy + error.remedy[:1].upper() + error.remedy[1:]) from error
    if revision is not None:
        raise ConfigError(f"revision={revision!r}", f"{name} is a local model", "leave revision out")
    return found


def load_tokenizer(folder: str | Path) -> Any:
    """Return the folder's Hugging Face tokenizer; code of a checkpoint is never run.

    Raises:
        ConfigError: no tokenizer there, or one that cannot be read.
    """
    if is_gguf(folder):
        return load_gguf_tokenizer(read_gguf(folder))
    try:
        if _plain_tokenizer(Path(folder)):
            from transformers import TokenizersBackend

            tokenizer = TokenizersBackend.from_pretrained(str(folder), local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        # Some settings of a file (truncation, padding) are taken back in the first use: not while threads use it.
        tokenizer.encode("")
        if isinstance(template := tokenizer.chat_template, str):
            tokenizer.chat_template = template.removeprefix("\ufeff")  # some editors begin a file with this mark
        return tokenizer
    except Exception as error:  # transformers and tokenizers raise many kinds, plain Exception among them
        raise ConfigError(f"tokenizer in {folder}", f"it cannot be read ({first_line(error)})", _RESTORE) from error


def load_vocabulary(folder: str | Path) -> Any:
    """Return an object with the ids and pieces of the folder's tokenizer, by ``get_vocab``.

    From ``tokenizer.json``, where there is one: seconds less than the tokenizer itself, which imports much
    more.

    Raises:
        ConfigError: no tokenizer there, or one that cannot be read.
    """
    if is_gguf(folder):
        return load_gguf_vocabulary(read_gguf(folder))
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return load_tokenizer(folder)
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"tokenizer in {folder}", f"it cannot be read ({first_line(error)})", _RESTORE) from error


def _plain_tokenizer(folder: Path) -> bool:
    """Return whether `AutoTokenizer` would choose transformers' plain class, by the files.

    `AutoTokenizer` imports torch's compiler to find out: half of the time in which a small model starts.
    """
    files = "tokenizer_config.json", "config.json"
    if not all(is_file(folder / name) for name in files):
        return False
    said, model = (read_json(folder / name, _RESTORE) for name in files)
    if not isinstance(said, dict) or not isinstance(model, dict) or "auto_map" in said or "auto_map" in model:
        return False
    kinds = "llama", "paceline_tracks"
    return said.get("tokenizer_class") == "TokenizersBackend" and model.get("model_type") in kinds
