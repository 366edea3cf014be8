"""How well a model answers: task scores of greedy outputs, and loss per token on held-out texts.

Speculation does not change answers, so scores belong to the target, and to an application's adapters where there
are any. Task prompts are those of `workloads`, rendered as there; texts are read and cut as training reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from kit.task_scores import score_task
from paceline.api.llm import LLM
from paceline.bench import encoding, workloads
from paceline.bench.workloads import Prompt, Workload
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.train.data import Encoder, Example, SourceSpec, load_source

TASK_WORKLOADS = {"sql": "wikisql"} | {task: task for task in ("e2e", "dialogsum", "gsm8k", "humaneval")}


def workload_of(task: str) -> str:
    """The workload of a task: a name of `TASK_WORKLOADS`, or a workload's own."""
    return TASK_WORKLOADS.get(task, task)


@dataclass(frozen=True, kw_only=True)
class TaskQuality:
    """Scores of one task, and on what."""

    task: str
    workload: dict[str, Any]  # `Workload.as_dict`: source, licence, number of prompts, fingerprint
    application: str | None
    scores: dict[str, float]  # 0 to 1; NAME_low and NAME_high are the ends of a 95% interval
    max_new_tokens: int
    prompt_tokens: int
    output_tokens: int
    finished: int  # outputs that ended by themselves, not at max_new_tokens
    elapsed_s: float
    notes: list[str]  # what was cut from prompts


@dataclass(frozen=True, kw_only=True)
class DomainLoss:
    """Mean negative log-likelihood of held-out text."""

    domain: str
    file: str
    application: str | None
    loss: float  # nats a token
    tokens: int  # that were predicted: all but the first of a text, those of the answer in a dialogue
    documents: int  # pieces of at most ``context`` tokens
    context: int


def evaluate(
    llm: LLM,
    tasks: Sequence[str],
    folder: str | Path | None = None,
    *,
    limit: int | None = 200,
    seed: int = 0,
    max_new_tokens: int | None = None,
    application: str | None = None,
    intervals: bool = True,
) -> list[TaskQuality]:
    """Answer the prompts of tasks greedily and score the outputs.

    Args:
        llm: any engine; how many prompts run at once is its ``max_sequences``.
        tasks: names of `TASK_WORKLOADS`.
        folder: where the files of their workloads are; None: the samples that come with the package.
        limit: prompts a task, chosen by ``seed``; None: all.
        max_new_tokens: of an output; None: the workload's own.
        application: whose adapters answer; None: the base model.
        intervals: also 95% bootstrap intervals.

    Raises:
        ConfigError: an unknown task, a file that is missing or broken, prompts without references, or a model
            without a tokenizer; raised before the first prompt is answered.
    """
    loaded = [(task, _load(task, folder, limit, seed)) for task in known_tasks(tasks)]
    prepared = [(task, workload, *encoded_prompts(llm, workload, max_new_tokens)) for task, workload in loaded]
    found = []
    for task, workload, prompts, most, notes in prepared:
        llm.forget()
        began, params = perf_counter(), SamplingParams(temperature=0, max_tokens=most)
        outputs = llm.generate([{"prompt_token_ids": [*ids]} for ids in prompts], params, application=application)
        elapsed_s = perf_counter() - began
        texts = [output.outputs[0].text for output in outputs]
        scored = TaskQuality(
            task=task,
            workload=workload.as_dict(),
            application=application,
            scores=score_task(task, texts, [wanted(task, prompt) for prompt in workload.prompts], intervals=intervals),
            max_new_tokens=most,
            prompt_tokens=sum(map(len, prompts)),
            output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            finished=sum(output.outputs[0].finish_reason == "stop" for output in outputs),
            elapsed_s=elapsed_s,
            notes=notes,
        )
        found.append(scored)
    return found


def wanted(task: str, prompt: Prompt) -> Sequence[str]:
    """What a prompt's answer is scored by: accepted texts; of HumanEval the prompt and its tests."""
    if task != "humaneval":
        return prompt.reference
    return prompt.turns[0], f"{prompt.extra['test']}\ncheck({prompt.extra['entry_point']})"


def known_tasks(tasks: Sequence[str]) -> Sequence[str]:
    """The same tasks.

    Raises:
        ConfigError: no task, or one that has no score.
    """
    unknown = [task for task in tasks if task not in TASK_WORKLOADS]
    if unknown or not tasks:
        wanted = f"task {unknown[0]!r}" if unknown else "no task"
        raise ConfigError(wanted, "there is nothing to score", f"name some of {', '.join(TASK_WORKLOADS)}")
    return tasks


def means(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores without the ends of their intervals."""
    return {name: value for name, value in scores.items() if not name.endswith(("_low", "_high"))}


def encoded_prompts(
    llm: LLM, workload: Workload, max_new_tokens: int | None = None
) -> tuple[list[list[int]], int, list[str]]:
    """Ids of a workload's prompts (first turns), most new tokens of an answer, and what was cut.

    Raises:
        ConfigError: prompts that do not fit, an answer without a token, or a model without a tokenizer.
    """
    most = workload.max_new_tokens if max_new_tokens is None else max_new_tokens
    longest = llm.engine.limits.max_model_len
    encoded = encoding.Encoded(workload, llm.tokenizer, max_model_len=longest, max_new_tokens=most)
    return [list(prompt.ids) for prompt in encoded.prompts], most, encoded.notes()


def _load(task: str, folder: str | Path | None, limit: int | None, seed: int) -> Workload:
    name = TASK_WORKLOADS[task]
    workload = workloads.load(name, folder=folder, limit=limit, seed=seed)
    if folder is not None and not Path(workload.origin).is_file():  # the packaged sample stood in
        file = workloads.WORKLOADS[name].file
        raise ConfigError(f"task {task} in {folder}", f"it has no {file}", "put it there, or name no folder")
    bare = next((prompt.id for prompt in workload.prompts if not prompt.reference), None)
    if bare is not None:
        raise ConfigError(f"task {task}", f"prompt {bare} has no reference", "leave it out, or give its answer")
    return workload


# -- texts


def domain_losses(
    llm: LLM,
    files: Sequence[str | Path],
    *,
    max_tokens: int = 20_000,
    context: int | None = None,
    application: str | None = None,
) -> list[DomainLoss]:
    """Loss per token on held-out texts, one domain a file, by the engine's own log-probabilities.

    Args:
        files: text or JSON lines, as `train.data.read_documents` takes them. Dialogues are rendered in the chat
            template and only their answers count; those over ``context`` are left out.
        max_tokens: of a file, from its beginning; at least one piece of it is measured.
        context: tokens of a piece of text; None: as many as the model takes.
        application: whose adapters predict; None: the base model.

    Raises:
        ConfigError: a file that is missing, broken or without a usable record, a context that does not fit, or a
            model without a tokenizer; raised before anything is computed.
    """
    if llm.tokenizer is None:
        raise CapabilityError("texts", "this model has no tokenizer, so text means nothing to it", "add its files")
    most = llm.engine.limits.max_model_len - 1  # the engine needs room for one more, which nobody reads
    if context is not None and not 2 <= context <= most:
        wrong = f"a piece has 2 tokens or more, and this model has room for {most}"
        raise ConfigError(f"context={context}", wrong, f"give 2 to {most}")
    if max_tokens < 2:
        raise ConfigError(f"max_tokens={max_tokens}", "nothing would be predicted", "give 2 or more")
    length = context or most
    specs = [SourceSpec(file=str(file), max_tokens=max_tokens) for file in files]
    loaded = [(spec, _examples(spec, llm, length)) for spec in specs]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for spec, examples in loaded:
        prompts = [example.tokens.tolist() for example in examples]
        llm.forget()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, application=application)
        losses = [loss for pair in zip(examples, outputs, strict=True) for loss in _losses(*pair)]
        scored = DomainLoss(
            domain=spec.name,
            file=Path(spec.file).name,
            application=application,
            loss=sum(losses) / len(losses),
            tokens=len(losses),
            documents=len(examples),
            context=length,
        )
        found.append(scored)
    return found


def _examples(spec: SourceSpec, llm: LLM, length: int) -> list[Example]:
    """Pieces of a file that have something to predict."""
    found = load_source(spec, Encoder(llm.tokenizer, length))
    usable = [example for example in found if len(example.tokens) > max(example.prompt, 1)]
    if not usable:
        raise ConfigError(f"data {spec.file}", "it has nothing to predict", "give texts of at least two tokens")
    return usable


def _losses(example: Example, output: Any) -> list[float]:
    """-log p of each token that is to be learned."""
    first = max(example.prompt, 1)  # nothing precedes token 0
    rows = (output.prompt_logprobs or [])[first:]
    tokens = example.tokens[first:].tolist()
    return [-(row or {})[token].logprob for token, row in zip(tokens, rows, strict=True)]
