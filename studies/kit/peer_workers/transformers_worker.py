"""transformers' ``generate``: plain, with an assistant model, with prompt lookup."""

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from worker_protocol import Arrivals, serve


class Watch(StoppingCriteria):
    """Never stops; notes the time at which tokens came (it is called once a target pass)."""

    def __init__(self, prompt_tokens, rows, began):
        self.prompt_tokens, self.began = prompt_tokens, began
        self.seen = Arrivals(rows)

    def __call__(self, input_ids, scores, **kwargs):
        now_ms = 1000 * (time.perf_counter() - self.began)
        for row in range(len(self.seen.counts)):
            self.seen.note(row, input_ids.shape[1] - self.prompt_tokens, now_ms)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Engine:
    def __init__(self, request):
        torch.set_num_threads(request["threads"])
        self.mode, self.options = request["mode"], request["options"]
        self.model = self._load(request["model"], request["dtype"])
        self.assistant = self._load(request["draft"], request["dtype"]) if self.mode == "assisted" else None
        self.eos = [(model, model.generation_config.eos_token_id) for model in (self.model, self.assistant) if model]
        self.ends = set(_as_list(self.model.generation_config.eos_token_id))
        self.drafted = self.accepted = 0
        if self.mode != "plain":
            self._count_candidates()
        self.about = {"version": transformers.__version__, "torch": torch.__version__}

    def _load(self, folder, dtype):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        return model.eval()

    def _count_candidates(self):
        """Read off what the candidate generator offers and is told: `generate` itself does not say."""
        make = self.model._get_candidate_generator

        def counted(*args, **kwargs):
            generator = make(*args, **kwargs)
            get, update = generator.get_candidates, generator.update_candidate_strategy

            def get_candidates(input_ids, *rest, **more):
                candidates = get(input_ids, *rest, **more)
                self.drafted += candidates[0].shape[1] - input_ids.shape[1]
                return candidates

            def update_candidate_strategy(input_ids, scores, num_matches, *rest, **more):
                self.accepted += int(num_matches)
                return update(input_ids, scores, num_matches, *rest, **more)

            generator.get_candidates = get_candidates
            generator.update_candidate_strategy = update_candidate_strategy
            return generator

        self.model._get_candidate_generator = counted

    def _speculation(self):
        if self.mode == "assisted":
            return {"assistant_model": self.assistant, **self.options}
        return self.options

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, ignore_eos):
        """Answer prompts with ``generate``, timed around the call."""
        pad = self.model.generation_config.pad_token_id
        pad = 0 if pad is None else pad
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        # Not by min_new_tokens: that forbids the end of text, after which the text is another than everybody else's.
        for model, eos in self.eos:
            model.generation_config.eos_token_id = None if ignore_eos else eos
        self.drafted = self.accepted = 0
        began = time.perf_counter()
        watch = Watch(width, len(prompts), began)
        rows = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([watch]),
            **self._speculation(),
        )
        wall_ms = 1000 * (time.perf_counter() - began)
        outputs = [self._trim(row[width:].tolist(), ignore_eos) for row in rows]
        return {
            "outputs": outputs,
            "wall_ms": wall_ms,
            **watch.seen.as_dict(),
            "drafted": self.drafted,
            "accepted": self.accepted,
        }

    def _trim(self, ids, ignore_eos):
        """Up to and with the first end of text: what follows in a row is padding."""
        ends = [] if ignore_eos else [i for i, token in enumerate(ids) if token in self.ends]
        return ids[: ends[0] + 1] if ends else ids


def _as_list(value):
    return [] if value is None else value if isinstance(value, list) else [value]


if __name__ == "__main__":
    serve(Engine)
