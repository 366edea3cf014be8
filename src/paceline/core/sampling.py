"""Choosing one token: the logits processors of every node, counter-based noise.

Every draw is an argmax (Gumbel-max). The noise of a draw is a pure function of (seed, sample index, the position the
token will occupy, domain, token id): never of the batch, the request or the clock. A drafted node is
therefore sampled exactly as plain decoding would sample it, with its ancestors as its output.

Axis letters: n rows (nodes), D depth, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from struct import Struct

import torch
from torch import Tensor

from . import noise
from .counts import TokenCounts
from .errors import CapabilityError, ConfigError
from .grammar import Matcher
from .noise import DRAFT
from .noise import derive_seed as derive_seed
from .params import SamplingParams as SamplingParams
from .params import refuse
from .tree import padded_paths
from .truncation import keep_min_p, keep_top_k, keep_top_p

CPU = torch.device("cpu")
BEHIND = 2.0  # nats, by which candidates that a draft's own truncation leaves out come after the others

# ---------------------------------------------------------------------------------------------------------------------
# One sequence


_Step = Callable[[Tensor, "Tensor | None"], object]  # (logits [n, V], paths [n, D] or None), in place


class SequenceSampler:
    """The sampling rules and the noise of one sequence (one of the n samples of a request).

    A *row* is a position where a next token is chosen. ``paths`` states which drafted tokens lie between the committed
    output and the row: None if there are none, else int64 [n, D], -1 padded, from below the root
    down to and including the row's own node. A row's output is the committed output and its path.

    The result for a row does not depend on the other rows.

    Args:
        params: the rules.
        prompt_ids: token ids of the prompt (the repetition penalty counts them).
        seed: any integer, taken mod 2^64.
        sample_index: which of the n samples this is.
        vocab_size: width of the logits.
        eos_ids: masked, as the stop ids are, until the output has ``min_tokens`` tokens.
        matcher: the grammar of ``params``, at its beginning.

    Raises:
        ConfigError: a token id or a count, in the parameters or the prompt, that the vocabulary does not have.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        sample_index: int,
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        matcher: Matcher | None = None,
    ) -> None:
        enders = {i for i in eos_ids if i < vocab_size} | set(params.stop_token_ids or ())
        _check_against_vocabulary(params, prompt_ids, len(enders), vocab_size)
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.vocab_size = vocab_size
        self.greedy = params.greedy
        self.tokens = list(prompt_ids)  # prompt and committed output
        self.prompt_len = len(self.tokens)
        self.matcher = matcher
        self._enders = sorted(enders)
        self._counts: dict[torch.device, TokenCounts] = {}
        self._noise_rows: dict[tuple[torch.device, int], Tensor] = {}
        self._steps = self._active_steps()
        self._rules: tuple[int, bytes] | None = None  # number of steps, and see `rules`
        self.fault: Exception | None = None  # what a rule of the request raised

    # -- state

    @property
    def plain(self) -> bool:
        """Return whether every choice from now on is the argmax of the raw logits."""
        return self.greedy and not self._steps

    @property
    def draws(self) -> bool:
        """Return whether tokens are drawn by temperature and truncations alone."""
        return not self.greedy and len(self._steps) == self._truncations

    @property
    def rules(self) -> bytes:
        """Return ``struct Rules`` of compiled code: of temperature, truncations and a grammar's masks alone."""
        if self._rules is None or self._rules[0] != len(self._steps):
            p, compiled = self.params, len(self._steps) == self._truncations + (self.matcher is not None)
            min_p = math.log(p.min_p) if p.min_p > 0 else 1.0
            key = noise.key(self.seed, self.sample_index, noise.TARGET)
            packed = RULES.pack(key, p.temperature if compiled else -1.0, p.top_k, p.top_p, min_p)
            self._rules = len(self._steps), packed
        return self._rules[1]

    @property
    def output_ids(self) -> list[int]:
        """Return a copy of the committed output."""
        return self.tokens[self.prompt_len :]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append newly committed tokens to the output."""
        self.tokens.extend(tokens)
        if self._mask_enders in self._steps and len(self.tokens) - self.prompt_len >= self.params.min_tokens:
            self._steps.remove(self._mask_enders)
        if self._noise_rows:
            here = len(self.tokens)
            self._noise_rows = {k: row for k, row in self._noise_rows.items() if k[1] >= here}

    # -- choosing

    def process(self, logits: Tensor, paths: Tensor | None = None) -> Tensor:
        """Return the logits after all rules of the request, -inf where a token is excluded.

        Args:
            logits: [n, V], any float dtype.
            paths: None or [n, D] int64, see the class.

        Returns:
            [n, V] float32 or wider; the argument itself where no rule is active. At temperature 0 the
            temperature and the truncations, which cannot change an argmax, are left out.
        """
        if logits.shape[-1] != self.vocab_size:
            subject = f"sampling from logits of width {logits.shape[-1]}"
            raise CapabilityError(subject, f"the vocabulary has {self.vocab_size} tokens", "cut or pad the logits")
        wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if not self._steps:
            return wide
        result = wide.clone(memory_format=torch.contiguous_format) if wide is logits else wide
        paths = None if paths is None else paths.to(result.device)
        try:
            for step in self._steps:
                step(result, paths)
        except Exception as error:  # noted: whoever requested it, a drafter for one, is not to blame
            self.fault = error
            raise
        return result

    def scores(self, logits: Tensor, paths: Tensor | None, positions: Sequence[int]) -> Tensor:
        """Return [n, V]: `process`, plus each row's noise unless greedy. The next token is the argmax.

        Source: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, section 2).
        """
        processed = self.process(logits, paths)
        if self.greedy:
            return processed
        gumbel = self.noise(positions, processed.device)
        return processed + gumbel if processed is logits else processed.add_(gumbel)

    def candidates(
        self, logits: Tensor, paths: Sequence[Sequence[int]], positions: Sequence[int], noisy: bool
    ) -> Tensor:
        """Return [n, V]: scores that rank candidates of another network for this sequence's next token.

        Like `ranked`, but tokens that top-k, top-p or min-p exclude come `BEHIND` the others and not out: the target's
        own truncation may keep them.
        """
        if not self._masks:
            return self.ranked(logits, paths, positions, noisy)
        drafted = padded_paths(paths, logits.device)
        within = self.process(logits, drafted)
        loose = logits.to(within.dtype, copy=True)
        for step in self._steps[: -self._masks]:
            step(loose, drafted)
        ranked = torch.where(within == -math.inf, loose - BEHIND, within)
        return ranked + self.noise(positions, ranked.device) if noisy else ranked

    def ranked(self, logits: Tensor, paths: Sequence[Sequence[int]], positions: Sequence[int], noisy: bool) -> Tensor:
        """Return [n, V]: scores that rank drafts, before a softmax: `scores` (``noisy``) or `process`.

        Args:
            logits: [n, V] of the drafting network.
            paths: of each row the drafted tokens below the root; empty: no row has any.
            positions: [n] that each row's token will occupy.
            noisy: whether the noise of the target's own choice counts.
        """
        if self.plain:
            return logits
        drafted = padded_paths(paths, logits.device)
        return self.scores(logits, drafted, positions) if noisy else self.process(logits, drafted)

    def choose(self, logits: Tensor, paths: Tensor | None, positions: Sequence[int]) -> Tensor:
        """Return [n] int64: the token that plain decoding chooses after each row."""
        return self.scores(logits, paths, positions).argmax(dim=-1)

    def probs(self, logits: Tensor, paths: Tensor | None = None) -> Tensor:
        """Return [n, V]: the distribution p from which each row's token is drawn; one-hot when greedy."""
        processed = self.process(logits, paths)
        if self.greedy:
            chosen = processed.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(processed).scatter_(-1, chosen, 1.0)
        return processed.softmax(dim=-1)

    # -- noise

    def noise(self, positions: Sequence[int], device: torch.device = CPU) -> Tensor:
        """Return [n, V] float32 Gumbel noise of the target's own choice, and of coupled drafts.

        Args:
            positions: [n] the position that each row's token will occupy.
            device: where the noise is wanted.
        """
        rows = self._cached_noise(positions, device)
        if len(rows) == 1:
            return rows[positions[0]].expand(len(positions), -1)
        return torch.stack([rows[p] for p in positions]) if rows else torch.empty(0, self.vocab_size, device=device)

    def draft_noise(
        self, positions: Sequence[int], branches: Sequence[int], device: torch.device = CPU, domain: int = DRAFT
    ) -> Tensor:
        """Return [n, V] float32 Gumbel noise for drafts that are drawn independently of the target's choice.

        The k largest of log q + noise are k draws without replacement, in draw order (Kool et al. 2019).
        ``branches`` distinguish rows at one position that are to differ.
        """
        return torch.stack(noise.gumbel_rows(self._keys(domain, positions, branches), self.vocab_size, device))

    def accept_uniform(self, positions: Sequence[int], branches: Sequence[int]) -> Tensor:
        """Return [n] float64 in (0, 1), on the CPU: decides whether rejection sampling accepts a drafted token.

        ``branches`` distinguish nodes at one position.
        """
        keys = self._keys(noise.ACCEPT, positions, branches)
        return torch.tensor([noise.uniform(key) for key in keys], dtype=torch.float64)

    def residual_gumbel(self, position: int, device: torch.device = CPU) -> Tensor:
        """Return [V] float32 Gumbel noise for the token drawn where rejection sampling stops."""
        return self.draft_noise([position], [0], device, noise.RESIDUAL)[0]

    def _cached_noise(self, positions: Sequence[int], device: torch.device) -> dict[int, Tensor]:
        """Return rows by position. A draft and its check use the same rows, so they are kept until they are passed."""
        rows = {p: self._noise_rows.get((device, p)) for p in positions}
        missing = [p for p, row in rows.items() if row is None]
        keys = self._keys(noise.TARGET, missing, [0] * len(missing))
        fresh = dict(zip(missing, noise.gumbel_rows(keys, self.vocab_size, device), strict=True))
        self._noise_rows.update({(device, p): row for p, row in fresh.items()})
        while len(self._noise_rows) > _CACHED_ROWS:
            self._noise_rows.pop(next(iter(self._noise_rows)))
        return {p: fresh[p] if row is None else row for p, row in rows.items()}

    def _keys(self, domain: int, positions: Sequence[int], branches: Sequence[int]) -> list[int]:
        base = (self.seed, self.sample_index, domain)
        return [noise.key(*base, position, branch) for position, branch in zip(positions, branches, strict=True)]

    # -- the rules, in their order

    def _active_steps(self) -> list[_Step]:
        """Return the rules that can change a logit, in the order in which they apply."""
        p = self.params
        warm = not p.greedy
        table: tuple[tuple[bool, _Step], ...] = (
            (p.repetition_penalty != 1, self._penalise_repetition),
            (p.presence_penalty != 0 or p.frequency_penalty != 0, self._penalise_output),
            (bool(p.logit_bias), self._add_bias),
            (p.min_tokens > 0 and bool(self._enders), self._mask_enders),
            (self.matcher is not None, self._apply_grammar),
            (warm and p.temperature != 1, lambda x, _: x.div_(p.temperature)),
            (warm and 0 < p.top_k < self.vocab_size, lambda x, _: keep_top_k(x, p.top_k)),
            (warm and p.top_p < 1, lambda x, _: keep_top_p(x, p.top_p)),
            (warm and p.min_p > 0, lambda x, _: keep_min_p(x, p.min_p)),
        )
        self._truncations = sum(active for active, _ in table[-4:])  # the temperature among them
        self._masks = sum(active for active, _ in table[-3:])
        return [step for active, step in table if active]

    def _counted(self, device: torch.device) -> TokenCounts:
        if device not in self._counts:
            self._counts[device] = TokenCounts(self.tokens[: self.prompt_len], self.vocab_size, device)
        counts = self._counts[device]
        counts.catch_up(self.tokens)
        return counts

    def _penalise_repetition(self, logits: Tensor, paths: Tensor | None) -> None:
        """Make tokens of prompt and output less likely (Keskar et al. 2019, section 4.1, sign-aware)."""
        counts, penalty = self._counted(logits.device), self.params.repetition_penalty
        seen = (counts.with_paths(paths) > 0) | counts.in_prompt  # [n or 1, V]
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits.copy_(torch.where(seen, penalised, logits))

    def _penalise_output(self, logits: Tensor, paths: Tensor | None) -> None:
        """Subtract the presence penalty once and the frequency penalty for each occurrence in the output."""
        counts = self._counted(logits.device).with_paths(paths)  # [n or 1, V]
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        # Multiply, then subtract: a fused form may round differently at a row's end, by its place in the batch.
        logits.sub_(counts.to(logits.dtype) * frequency).sub_((counts > 0).to(logits.dtype) * presence)

    def _add_bias(self, logits: Tensor, paths: Tensor | None) -> None:
        bias = self.params.logit_bias or {}
        ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
        logits[:, ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)

    def _mask_enders(self, logits: Tensor, paths: Tensor | None) -> None:
        """Rule out EOS and stop ids where the row's output is shorter than min_tokens."""
        missing = self.params.min_tokens - (len(self.tokens) - self.prompt_len)
        depth = torch.zeros(1, dtype=torch.int64, device=logits.device) if paths is None else (paths >= 0).sum(dim=1)
        ids = torch.tensor(self._enders, dtype=torch.int64, device=logits.device)
        early = (depth < missing)[:, None]  # [n or 1, 1]
        logits[:, ids] = torch.where(early, -math.inf, logits[:, ids])

    def _apply_grammar(self, logits: Tensor, paths: Tensor | None) -> None:
        """Rule out what the grammar does not allow after each row's output."""
        assert self.matcher is not None
        output = self.output_ids
        below = [[] for _ in logits] if paths is None else [[t for t in row if t >= 0] for row in paths.tolist()]
        for row, path in zip(logits, below, strict=True):
            allowed = self.matcher([*output, *path])
            row.masked_fill_(~allowed.to(row.device), -math.inf)
            if not bool((row > -math.inf).any()):
                subject = f"a grammar mask after {len(output) + len(path)} tokens"
                wrong = "it allows no token at all, or only those that min_tokens rules out"
                raise ConfigError(subject, wrong, "let the grammar allow EOS where it ends")


# `Rules` in kernels/cpp/kernels/abi.h. A temperature of -1: other rules; min_p: its logarithm, 1: none.
RULES, RULES_FIELDS = Struct("=Qdqdd"), "key temperature top_k top_p min_p"
_CACHED_ROWS = 32  # noise rows kept for one sequence; a deeper draft computes the rest again


def _check_against_vocabulary(params: SamplingParams, prompt_ids: Sequence[int], enders: int, vocab_size: int) -> None:
    """Refuse token ids and counts that the vocabulary does not have, and rules that leave no token to choose from."""
    remedy = f"use ids from 0 to {vocab_size - 1}"
    named = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids, "prompt_token_ids": prompt_ids}
    for name, ids in named.items():
        for token in ids or ():
            if not 0 <= token < vocab_size:
                refuse(name, token, f"the vocabulary has {vocab_size} tokens", remedy)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            refuse(name, value, f"the vocabulary has {vocab_size} tokens", f"request {vocab_size} at most")
    if params.min_tokens > 0 and enders == vocab_size:
        wrong = f"EOS and the stop ids, which it rules out, are all {vocab_size} tokens of the vocabulary"
        refuse("min_tokens", params.min_tokens, wrong, "use min_tokens=0, or fewer stop_token_ids")
