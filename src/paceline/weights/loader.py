"""From a `Source` to a `Decoder` ready to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from ..model.attention.base import AttentionBackend
from ..model.decoder import Decoder
from ..model.families import DecoderConfig
from ..model.parallel import Ranks
from .blocks import StoredWeights
from .files import StoredTensor, free_bytes, get_tensor, is_file, is_out_of_memory, opened, read_json, stored_tensors
from .gguf import GGUFTensor, is_gguf, read_gguf
from .gguf_model import tensors_of
from .group_quant import GroupTensor, take_groups
from .names import Piece, weight_map
from .source import RESTORE, Source, parse_device
from .stored_blocks import BlockTensor, in_blocks

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32", "F64")  # types in which weights may be stored


def load_model(
    source: Source,
    *,
    attention: AttentionBackend,
    device: str | torch.device = "cpu",
    exact: bool = False,
    native: bool = False,
    layers: tuple[int, int] | None = None,
    ranks: Ranks | None = None,
    network: type[Decoder] | None = None,
) -> Decoder:
    """Load a checkpoint, or a part of its layers.

    The headers of the weight files are compared with ``config.json``, and the memory that the weights need with what is
    free, before anything is allocated.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        exact, native: see `Decoder`.
        layers: the first one, and one past the last one; None: all. They are numbered from 0 then. Without the last
            layer the decoder's embedding and head are zeros, for nobody to use.
        ranks: the share of one of several ranks is loaded, and nothing else is read.
        network: what the weights go into; None: a `Decoder`.

    Raises:
        ConfigError: files that are missing, broken or do not fit the configuration, or weights for which there is
            too little memory.
        CapabilityError: a device or model option that is not available.
    """
    folder, config, kind, quant = source.folder, source.shape, source.dtype, source.quant
    place = parse_device(device)
    layout, ends = read_layout(folder, config), layers is None or layers[1] == config.num_layers
    if quant == "stored" and not is_gguf(folder) and config.quantised is None:
        wrong = f"{folder} has no weights in blocks"
        raise ConfigError("dtype='stored'", wrong, "name a GGUF file or a checkpoint in 4 bits, or leave it out")
    if layers is not None:
        layout, config = _part(layout, layers, ends), config.part(*layers, ends)
    if ranks is not None:
        layout = layout.cut(ranks.share.cut)
    blocks = layout.blocks(config) if quant == "stored" else {}
    with memory_for(folder, layout, kind, place, blocks):
        options: dict[str, Any] = {"exact": exact, "quant": quant, "native": native, "ranks": ranks}
        decoder = (network or Decoder)(config, attention, dtype=kind, device=place, **options)
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
    pieces = []
    for piece, tensor in layout.pieces:
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", piece.into)
        if match is None and ends:
            pieces.append((piece, tensor))
        elif match is not None and layers[0] <= int(match[1]) < layers[1]:
            pieces.append((replace(piece, into=f"layers.{int(match[1]) - layers[0]}.{match[2]}"), tensor))
    return Layout(pieces, layout.heads if ends else [])


@contextmanager
def memory_for(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    blocks: StoredWeights,
) -> Iterator[None]:
    """Refuse, in words, weights that do not fit: before they are loaded, and where the allocator gives up."""
    count = sum(piece.numel for piece, _ in layout.pieces if piece.into not in blocks)
    # One tensor more: weights are converted and packed one at a time.
    needed_bytes = (count + max(piece.numel for piece, _ in layout.pieces)) * dtype.itemsize
    needed_bytes += round(1.1 * sum(tensor.nbytes for block_tensors in blocks.values() for tensor in block_tensors))
    free = free_bytes(device)
    subject = f"the model in {folder} as {str(dtype).removeprefix('torch.')} on {device}"
    held = count + sum(piece.numel for piece, _ in layout.pieces if piece.into in blocks)
    needs = f"its {held:,} parameters take {needed_bytes / 2**30:.1f} GiB while they are loaded"
    remedy = "use a smaller dtype or model, or free some memory"
    if free is not None and needed_bytes > free:
        raise ConfigError(subject, f"{needs}, and {free / 2**30:.1f} GiB are free", remedy)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(subject, f"{needs}, which is more than this machine has", remedy) from error


# --- weights --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every parameter in a checkpoint's files; see `read_layout`."""

    pieces: Sequence[tuple[Piece, StoredTensor | BlockTensor]]
    heads: Sequence[StoredTensor] = ()  # stored next to a tied embedding, of which they must be copies

    def cut(self, part: Callable[[Piece], Iterable[Piece]]) -> Layout:
        """Return the part that is read of each tensor, where that is not all."""
        return Layout([(part_piece, tensor) for piece, tensor in self.pieces for part_piece in part(piece)])

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
    """Find every parameter in the headers of the files; no data is read.

    With ``layers_only`` the files hold the layers alone.

    Raises:
        ConfigError: a file or tensor that is missing, broken, misshaped, there twice or left over.
    """
    expected = {piece.source: piece for piece in weight_map(config) if piece.of_layer or not layers_only}
    stored: dict[str, Any] = {}
    groups: dict[str, GroupTensor] = {}
    if is_gguf(folder):
        stored = {tensor.source: tensor for tensor in tensors_of(read_gguf(folder))}
    else:
        stored = _by_source(stored_tensors(_weight_files(folder), RESTORE))
        groups = take_groups(config.quantised, {source: piece.shape for source, piece in expected.items()}, stored)
    pieces: list[tuple[Piece, StoredTensor | BlockTensor]] = []
    for source, tensor in stored.items():
        if source in expected:
            _check_piece(folder, expected[source], tensor)
            pieces.append((expected[source], tensor))
    pieces += [(expected[source], group) for source, group in groups.items()]
    others = {source: tensor for source, tensor in stored.items() if source not in expected}
    heads = [others.pop("lm_head.weight")] if "lm_head.weight" in others else []
    _refuse(folder, "misses", sorted(expected.keys() - stored.keys() - groups.keys()))
    buffers = ".rotary_emb.inv_freq", ".masked_bias"  # of old checkpoints
    _refuse(folder, "has unexpected", [tensor.name for s, tensor in others.items() if not s.endswith(buffers)])
    return Layout(pieces, heads)


def _by_source(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors by name, without the leading "model." that some checkpoints have."""
    by_source: dict[str, StoredTensor] = {}
    for tensor in tensors:
        source = tensor.name.removeprefix("model.")
        if source in by_source:
            places = f"in {by_source[source].file.name} and in {tensor.file.name}"
            raise ConfigError(f"tensor {source} in {tensor.file.parent}", f"it is there twice, {places}", RESTORE)
        by_source[source] = tensor
    return by_source


def _check_piece(folder: Path, piece: Piece, tensor: StoredTensor | GGUFTensor) -> None:
    subject = f"tensor {tensor.name} in {folder}"
    if isinstance(tensor, StoredTensor) and tensor.dtype not in _FLOATS:
        remedy = "use the original checkpoint, or dtype='int8'"
        raise ConfigError(subject, f"it is {tensor.dtype}, a quantised weight", remedy)
    if tensor.shape != piece.shape:
        wrong = f"its shape is {shown(list(tensor.shape))}, and its configuration needs {list(piece.shape)}"
        raise ConfigError(subject, wrong, "use the configuration that belongs to these weights")


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
        with opened(file, RESTORE) as tensors:
            for piece, tensor in stored:
                if tensor.file == file:
                    _fill(parameters[piece.into], piece, get_tensor(tensors, tensor, RESTORE, piece.take))
    for head in layout.heads:
        with opened(head.file, RESTORE) as tensors:
            _check_tied(decoder, get_tensor(tensors, head, RESTORE), head.file)


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
    raise ConfigError(f"model folder {folder}", f"it has neither {WEIGHTS} nor {INDEX}", RESTORE)


def _shards(folder: Path) -> list[Path]:
    index = read_json(folder / INDEX, RESTORE)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise ConfigError(str(folder / INDEX), "it has no weight_map", RESTORE)
    shards = sorted(set(names.values()))
    outside = [n for n in shards if Path(n).name != n]
    if outside:
        raise ConfigError(str(folder / INDEX), f"shard {shown(outside[0])} is not in the folder", RESTORE)
    missing = [n for n in shards if not is_file(folder / n)]
    if missing:
        raise ConfigError(f"model folder {folder}", f"shard {missing[0][:200]} is missing", RESTORE)
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
