"""Our drafters within transformers' own ``generate``: its ids, its stops, its streamer, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import FAMILIES, VOCAB, build, greedy

from paceline.bench.workloads import choose, load
from paceline.bridges.tokens import TokenDrafter
from paceline.bridges.transformers import generate
from paceline.core.errors import ConfigError
from paceline.draft.base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from paceline.draft.proposal import Proposal
from paceline.weights import zoo

TOKENS = 40
OURS = {"custom_generate": generate, "pad_token_id": 0}


def prompt(length: int = 30) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def noised(answer: list[int]) -> list[int]:
    """An answer with every seventh token wrong: drafts that are accepted for a while."""
    return [token if i % 7 else (token + 1) % VOCAB for i, token in enumerate(answer, start=1)]


@pytest.fixture
def passes() -> Iterator[Callable[[torch.nn.Module], list[int]]]:
    """Rows of each pass of a model, as they come."""
    hooks = []

    def count(model: torch.nn.Module) -> list[int]:
        rows: list[int] = []
        hooks.append(model.get_output_embeddings().register_forward_hook(lambda _, x, __: rows.append(x[0].shape[1])))
        return rows

    yield count
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedModel:
    return build("llama2", tmp_path_factory.mktemp("llama"), seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_sampled_ids_are_those_of_every_family(family: str, tmp_path: Path, passes) -> None:
    """With drafts that are right for six tokens and wrong in the seventh, beyond sliding windows."""
    model, ids = build(family, tmp_path, seed=2), prompt()
    answer = greedy(model, ids[0].tolist(), TOKENS)
    rows = passes(model)
    ours = model.generate(
        ids, do_sample=False, max_new_tokens=TOKENS, drafter="prediction", prediction=noised(answer), **OURS
    )
    assert ours[0, ids.shape[1] :].tolist() == answer
    assert len(rows) < TOKENS / 2 and max(rows) > 4

    chosen = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": TOKENS}
    torch.manual_seed(5)
    answer = model.generate(ids, pad_token_id=0, **chosen)[0, ids.shape[1] :].tolist()
    torch.manual_seed(5)
    ours = model.generate(ids, drafter="prediction", prediction=noised(answer), **chosen, **OURS)
    assert ours[0, ids.shape[1] :].tolist() == answer


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "hybrid:ngram+suffix"])
def test_ids_with_each_look_up(llama: transformers.PreTrainedModel, drafter: str, passes) -> None:
    """A penalty on repetition reads what was said; the prompt repeats itself, so drafts are made."""
    ids = prompt(12).repeat(1, 3)
    asked = {"do_sample": False, "max_new_tokens": TOKENS, "repetition_penalty": 1.05}
    expected = llama.generate(ids, pad_token_id=0, **asked)
    rows = passes(llama)
    assert torch.equal(llama.generate(ids, drafter=drafter, **asked, **OURS), expected)
    assert max(rows[1:]) > 1


@pytest.mark.parametrize("prompts", [4, pytest.param(50, marks=pytest.mark.full)])
def test_ids_of_the_embedded_model(prompts: int, passes) -> None:
    """In fewer passes, with three drafters in turn, of which the first remembers its answers."""
    folder = zoo.find("paceline-small")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    drafters = [TokenDrafter("suffix"), "ngram", "hybrid:ngram+suffix"]
    plain = ours = 0
    for number, asked in enumerate(choose(load("wikisql").prompts, prompts)):
        given = tokenizer(asked.turns[0], return_tensors="pt")
        wanted = {"do_sample": False, "max_new_tokens": 16}
        rows = passes(model)
        expected = model.generate(**given, **wanted)
        plain += len(rows)
        found = model.generate(**given, **wanted, custom_generate=generate, drafter=drafters[number % 3])
        ours += len(rows) - expected.shape[1] + given.input_ids.shape[1]
        assert torch.equal(found, expected), asked.turns[0]
    assert ours < 0.9 * plain


def test_eos_max_length_and_criteria_end_it_where_they_end_plain_search(llama: transformers.PreTrainedModel) -> None:
    """Each of them in the middle of a draft that would have gone on."""
    ids = prompt()
    answer = greedy(llama, ids[0].tolist(), TOKENS)

    class Length(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= ids.shape[1] + 17])

    eos = next(token for i, token in enumerate(answer) if i > 9 and token not in answer[:i])
    stops = transformers.StoppingCriteriaList([Length()])
    for asked in ({"max_new_tokens": 11}, {"stopping_criteria": stops}, {"eos_token_id": eos}, {"max_length": 41}):
        asked = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": TOKENS, **asked}
        if "max_length" in asked:
            del asked["max_new_tokens"]
        expected = llama.generate(ids, **asked)
        drafted = {"custom_generate": generate, "drafter": "prediction", "prediction": answer}
        assert torch.equal(llama.generate(ids, **asked, **drafted), expected)
        assert expected.shape[1] < ids.shape[1] + TOKENS


def test_scores_and_the_cache_are_those_of_plain_search(llama: transformers.PreTrainedModel) -> None:
    """The cache holds every token but the last, so that a second call goes on from it."""
    ids = prompt()
    asked = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True}
    asked |= {"output_scores": True, "output_logits": True}
    plain = llama.generate(ids, pad_token_id=0, **asked)
    answer = plain.sequences[0, ids.shape[1] :].tolist()
    ours = llama.generate(ids, drafter="prediction", prediction=[*noised(answer), 5, 5], **asked, **OURS)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.cat(getattr(ours, name)), torch.cat(getattr(plain, name)), rtol=1e-4, atol=1e-4
        )
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length() == ids.shape[1] + 19
    more = {"do_sample": False, "max_new_tokens": 10}
    expected = llama.generate(plain.sequences, pad_token_id=0, **more)
    assert torch.equal(llama.generate(ours.sequences, past_key_values=ours.past_key_values, **more, **OURS), expected)


def test_a_streamer_hears_the_prompt_and_every_token_by_itself(llama: transformers.PreTrainedModel) -> None:
    heard: dict[str, list[list[int]]] = {}

    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self, name: str) -> None:
            self.heard = heard.setdefault(name, [])

        def put(self, value: torch.Tensor) -> None:
            self.heard.append(value.flatten().tolist())

        def end(self) -> None:
            self.heard.append([])

    ids = prompt()
    asked = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    answer = llama.generate(ids, **asked, streamer=Streamer("plain"))[0, ids.shape[1] :].tolist()
    drafted = {"custom_generate": generate, "drafter": "prediction", "prediction": answer}
    llama.generate(ids, **asked, **drafted, streamer=Streamer("ours"))
    assert heard["ours"] == heard["plain"] == [ids[0].tolist(), *([token] for token in answer), []]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_beams": 2}, "beam"),
        ({"inputs": prompt().repeat(2, 1)}, "more than one sequence"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "static cache"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"drafter": "eagle:somewhere"}, "trained network"),
        ({"drafter": "hybrid:suffix+draft_model:somewhere"}, "trained network"),
        ({"drafter": "magicdec"}, "runs a network"),
        ({"drafter": "none"}, "nothing to draft with"),
        ({"drafter": "sufix"}, "suffix"),
    ],
)
def test_what_chains_cannot_serve_is_refused_in_words(
    llama: transformers.PreTrainedModel, asked: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        llama.generate(**{"inputs": prompt(), "max_new_tokens": 4, "do_sample": False, **OURS, **asked})


def test_a_drafter_of_ones_own_that_reads_tokens_alone(llama: transformers.PreTrainedModel) -> None:
    """It is shown every token and how many were its own, and told when the sequence ends."""
    ids = prompt()
    answer = greedy(llama, ids[0].tolist(), 20)

    class Knows(Drafter):
        spec = DrafterSpec(name="knows", default_budget=3)

        def __init__(self) -> None:
            self.seen: list[int] = []
            self.accepted: list[int] = []
            self.ended: list[int] = []

        def draft(self, want: DraftRequest) -> list[Proposal]:
            said = len(want.sequences[0].tokens) - ids.shape[1]
            return [Proposal.chain(answer[said : said + min(want.budgets[0], want.max_depths[0])], 0.9)]

        def observe(self, step: StepFeatures) -> None:
            self.seen += step.committed[0]
            self.accepted += step.num_accepted

        def release(self, keys: Sequence[int]) -> None:
            self.ended += keys

    knows = Knows()
    ours = llama.generate(ids, do_sample=False, max_new_tokens=20, drafter=knows, **OURS)
    assert ours[0, ids.shape[1] :].tolist() == answer == knows.seen
    assert knows.accepted == [0, 3, 3, 3, 3, 2] and len(knows.ended) == 1
