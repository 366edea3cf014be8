"""vLLM's build for CPUs: plain, n-gram speculation, a draft model, an EAGLE head."""

import os
import time

from worker_protocol import Arrivals, serve


class Engine:
    def __init__(self, request):
        _environment(request)
        import torch
        import vllm
        from vllm import EngineArgs, LLMEngine

        self.mode = request["mode"]
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=request["model"],
                dtype=request["dtype"],
                skip_tokenizer_init=True,  # ids in, ids out
                max_model_len=request["max_model_len"],
                max_num_seqs=request["max_batch"],
                enable_prefix_caching=False,
                disable_log_stats=False,  # they count drafts
                speculative_config=self._speculation(request),
            )
        )
        self.serial = 0
        self.about = {
            "version": vllm.__version__,
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
        }

    def _speculation(self, request):
        if self.mode == "plain":
            return None
        draft = {"model": request["draft"]} if request["draft"] else {}
        return {"method": self.mode, **draft, **request["options"]}

    def generate(self, prompts, max_new_tokens, ignore_eos):
        """Answer prompts in one call, timed around it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        counted = self._counts()
        names = {f"{self.serial + i}": i for i in range(len(prompts))}
        self.serial += len(prompts)
        seen = Arrivals(len(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        for name, index in names.items():
            params = SamplingParams(
                temperature=0,
                max_tokens=max_new_tokens,
                ignore_eos=ignore_eos,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.engine.add_request(name, {"prompt_token_ids": prompts[index]}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                index = names[output.request_id]
                outputs[index].extend(output.outputs[0].token_ids)
                seen.note(index, len(outputs[index]), 1000 * (time.perf_counter() - began))
        wall_ms = 1000 * (time.perf_counter() - began)
        drafted, accepted = (now - before for now, before in zip(self._counts(), counted, strict=True))
        return {
            "outputs": outputs,
            "wall_ms": wall_ms,
            **seen.as_dict(),
            "drafted": drafted,
            "accepted": accepted,
        }

    def _counts(self):
        """Tokens drafted and accepted since the start."""
        if self.mode == "plain":
            return 0, 0
        values = {metric.name: getattr(metric, "value", 0) for metric in self.engine.get_metrics()}
        return (
            int(values.get("vllm:spec_decode_num_draft_tokens", 0)),
            int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
        )


def _environment(request):
    """What vLLM reads from the environment when it is imported."""
    cpus = sorted(os.sched_getaffinity(0))[: request["threads"]]
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)),  # "auto" leaves out one thread of a core
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process: no pipe, and nobody polls between two requests
        VLLM_CACHE_ROOT=os.path.join(request["cache"], "compiled", "vllm"),
    )


if __name__ == "__main__":
    serve(Engine)
