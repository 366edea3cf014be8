"""Peers: the protocol with a small worker that is a real process, what can go wrong, and (full) the real ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import peer_runs, peers
from kit.peer_runs import peer_methods, read_methods
from kit.peers import PEERS, WORKERS, Peer, PeerError, PeerKind, PeerMode, PeerResult
from kits.reports import World

from paceline import LLM, SamplingParams
from paceline.bench.config import BenchConfig, Progress
from paceline.bench.models import materialised
from paceline.bench.records import Method, Report
from paceline.bench.summary import Summary
from paceline.core.errors import ConfigError
from paceline.zoo import find

sys.path.insert(0, str(WORKERS))  # as the workers themselves find their neighbours
import llama_convert
import llama_worker
from worker_protocol import Arrivals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="peers are driven by POSIX signals")

FAKE = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(WORKERS)!r})
from worker_protocol import serve

class Engine:
    def __init__(self, request):
        if request["mode"] == "broken":
            raise ValueError("no such weights")
        if request["mode"] == "dead":
            print("out of memory, says the library", file=sys.stderr)
            os._exit(3)
        self.child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        print("a library prints what it likes")
        self.about = {{"version": "1.2", "request": request, "child": self.child.pid,
                       "omp": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid()}}

    def generate(self, prompts, max_new_tokens, ignore_eos):
        what = prompts[0][0]
        if what == 100:
            raise RuntimeError("prompt too long")
        if what == 101:
            os._exit(7)
        if what == 102:
            time.sleep(60)
        if what == 103:
            return {{"outputs": [], "wall_ms": 1.0}}
        if what == 104:
            return {{"outputs": [[1]], "wall_ms": 1.0, "surprise": 1}}
        outputs = [[ids[-1] + 1 + i for i in range(max_new_tokens)] for ids in prompts]
        return {{"outputs": outputs, "wall_ms": 2.0, "ttft_ms": [1.0], "drafted": 4, "accepted": 2}}

    def close(self):
        self.child.kill()

serve(Engine)
"""
BABBLE = """
import sys
for line in sys.stdin:
    print("loading ... done", flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Peer]]:
    """Makes and starts a peer that counts on from the last token of a prompt."""
    modes = {name: PeerMode() for name in ("plain", "broken", "dead")}
    modes |= {"drafting": PeerMode(draft=True, max_batch=1, options={"depth": 3, "width": None})}
    for name, text in (("fake", FAKE), ("babble", BABBLE)):
        (tmp_path / f"{name}.py").write_text(text)
        kind = PeerKind(name=name, worker=str(tmp_path / f"{name}.py"), modes=modes)
        monkeypatch.setitem(PEERS, name, kind)
        (tmp_path / name / "venv/bin").mkdir(parents=True)
        (tmp_path / name / "venv/bin/python").symlink_to(sys.executable)
        (tmp_path / name / ".ready-1").touch()
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path))
    made: list[Peer] = []

    def start(mode: str = "plain", name: str = "fake", draft: bool = False, **settings: Any) -> Peer:
        method = Method(name="m", engine=name, drafter=mode, settings=settings)
        draft_folder = tmp_path if draft else None
        made.append(Peer(method, tmp_path, draft_folder, threads=1, max_model_len=64, timeout_s=30))
        return made[-1]

    yield start
    for peer in made:
        peer.close()


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def state(pid: int) -> str:
    """As `ps` writes it: R, S, T (stopped), Z (dead, not yet collected); "" where there is no such process."""
    text = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return text.strip()[:1]


def gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


class TestProtocol:
    def test_answers_carry_ids_and_the_workers_own_clock(self, fake: Callable[..., Peer]) -> None:
        result = fake().run([[1, 2], [7]], 3)
        assert result.outputs == [[3, 4, 5], [8, 9, 10]]
        assert (result.wall_ms, result.ttft_ms, result.drafted, result.accepted) == (2.0, [1.0], 4, 2)
        assert result.passes == 6 - 2

    def test_the_request_says_all_that_the_worker_needs(
        self, fake: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # meant for this process
        peer = fake("drafting", draft=True, depth=5)
        request = peer.about["request"]
        assert request["options"] == {"depth": 5}  # width is left to the peer
        assert (request["model"], request["draft"]) == (str(tmp_path), str(tmp_path))
        assert (request["dtype"], request["threads"], request["max_model_len"]) == ("bfloat16", 1, 64)
        assert peer.about["omp"] is None
        assert peer.version == "1.2"

    def test_a_mode_without_draft_gets_none(self, fake: Callable[..., Peer]) -> None:
        assert fake("plain", draft=True).about["request"]["draft"] is None

    def test_none_is_plain(self, fake: Callable[..., Peer]) -> None:
        assert fake("none").about["request"]["mode"] == "plain"

    def test_what_a_library_prints_goes_to_the_log(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        assert "a library prints what it likes" in peer.log.read_text()

    def test_a_refusal_leaves_the_worker_running(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        with pytest.raises(PeerError, match="RuntimeError: prompt too long"):
            peer.run([[100]], 1)
        assert peer.run([[1]], 2).outputs == [[2, 3]]


class TestFailures:
    def test_load(self, fake: Callable[..., Peer]) -> None:
        with pytest.raises(PeerError, match="failed at 'load': ValueError: no such weights"):
            fake("broken")

    def test_death_at_load_quotes_the_log(self, fake: Callable[..., Peer]) -> None:
        with pytest.raises(PeerError, match=r"(?s)ended during 'load' with status 3.*out of memory, says the library"):
            fake("dead")

    def test_death_in_a_run_and_after(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        with pytest.raises(PeerError, match="status 7"):
            peer.run([[101]], 1)
        assert not peer.alive
        with pytest.raises(PeerError, match="is not running"):
            peer.run([[1]], 1)
        peer.close()
        assert wait_for(lambda: gone(peer.about["child"]))  # which its parent could not end any more

    def test_time_out_ends_the_worker_and_its_child(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        began = time.monotonic()
        with pytest.raises(PeerError, match=r"did not finish 'generate' within 0\.5 s"):
            peer.run([[102]], 1, timeout_s=0.5)
        assert time.monotonic() - began < 30
        assert not peer.alive
        assert wait_for(lambda: gone(peer.about["child"]))

    def test_what_is_no_json(self, fake: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers, "KILL_AFTER_S", 0.2)  # it does not end by itself
        with pytest.raises(PeerError, match="not the protocol: b'loading ... done'"):
            fake(name="babble")

    @pytest.mark.parametrize(("what", "said"), [(103, "0 outputs for 1 prompts"), (104, "surprise")])
    def test_a_reply_without_sense(self, fake: Callable[..., Peer], what: int, said: str) -> None:
        with pytest.raises(PeerError, match=said):
            fake().run([[what]], 1)


class TestChecks:
    def test_not_built_says_what_to_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_PEERS", str(tmp_path))
        for name in PEERS:
            assert f"make peer-{name}" in str(peers.available(name))
        with pytest.raises(PeerError, match="make peer-vllm"):
            Peer(Method(name="v", engine="vllm"), tmp_path, threads=1, max_model_len=8)

    def test_incomplete(self, fake: Callable[..., Peer], tmp_path: Path) -> None:
        assert peers.available("fake") is None
        (tmp_path / "fake/venv/bin/python").unlink()
        assert "venv/bin/python is missing" in str(peers.available("fake"))

    def test_unknown_peer(self) -> None:
        with pytest.raises(ConfigError, match="transformers, llama.cpp, vllm"):
            Peer(Method(name="m", engine="tgi"), "", threads=1, max_model_len=8)

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"drafter": "eagle"}, "no mode 'eagle'"),
            ({"drafter": "draft-simple", "settings": {"depth": 3}}, "no option 'depth'. Options: draft_tokens, p_min"),
            ({"dtype": "int8"}, "bfloat16, float16, float32"),
        ],
    )
    def test_bad_methods(self, asked: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            peers.check(Method(**{"name": "m", "engine": "llama.cpp", **asked}))

    def test_no_head(self) -> None:
        with pytest.raises(ConfigError, match="vllm/eagle;head=FOLDER"):
            peers.check(Method(name="m", engine="vllm", drafter="eagle"))
        asked = Method(name="m", engine="vllm", drafter="eagle", settings={"head": "somewhere"})
        assert peers.check(asked)[2] == {"num_speculative_tokens": 3, "head": "somewhere"}

    def test_no_draft_and_too_large_a_batch(self) -> None:
        method = Method(name="m", engine="transformers", drafter="assisted")
        with pytest.raises(ConfigError, match="needs a draft model"):
            peers.check(method, draft=False)
        with pytest.raises(ConfigError, match="1 prompt at a time"):
            peers.check(method, batch=2)
        assert peers.check(method)[2] == {}  # its own schedule

    def test_stored_dtype(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
        assert peers.stored_dtype(tmp_path) == "float32"
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="Set the dtype"):
            peers.stored_dtype(tmp_path)

    def test_every_worker_and_its_requirements_are_there(self) -> None:
        for kind in PEERS.values():
            assert (WORKERS / kind.worker).is_file()
            assert (WORKERS / f"{kind.name}.txt").is_file()
            assert "plain" in kind.modes


class TestLife:
    def test_a_paused_worker_and_its_child_use_no_time(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        family = [peer.about["pid"], peer.about["child"]]
        assert state(peer.about["child"]) == "R"
        peer.pause()
        peer.pause()
        assert wait_for(lambda: all(state(pid) == "T" for pid in family))
        assert peer.alive
        peer.resume()
        assert wait_for(lambda: all(state(pid) in ("R", "S") for pid in family))

    def test_a_run_wakes_a_paused_worker(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        peer.pause()
        assert peer.run([[1]], 1).outputs == [[2]]

    @pytest.mark.parametrize("paused", [False, True])
    def test_close_ends_all_of_it(self, fake: Callable[..., Peer], paused: bool) -> None:
        peer = fake()
        if paused:
            peer.pause()
        with peer:
            pass
        assert not peer.alive
        assert wait_for(lambda: gone(peer.about["pid"]) and gone(peer.about["child"]))
        peer.close()  # once more does no harm

    @pytest.mark.parametrize("doing", ["idle", "busy", "paused"])
    def test_dies_with_its_parent(self, fake: Callable[..., Peer], tmp_path: Path, doing: str) -> None:
        script = f"""
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(WORKERS.parents[1])!r})
from kit import peers
from paceline.bench.records import Method
folder = Path({str(tmp_path)!r})
modes = {{"plain": peers.PeerMode()}}
peers.PEERS["fake"] = peers.PeerKind(name="fake", worker=str(folder / "fake.py"), modes=modes)
peer = peers.Peer(Method(name="m", engine="fake"), folder, threads=1, max_model_len=8)
print(peer.about["pid"], peer.about["child"], flush=True)
if {doing!r} == "busy":
    threading.Thread(target=peer.run, args=([[102]], 1), daemon=True).start()
    time.sleep(0.5)
if {doing!r} == "paused":
    peer.pause()
    time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        family = [int(pid) for pid in done.stdout.split()]
        try:
            assert len(family) == 2
            assert wait_for(lambda: all(map(gone, family)))
        finally:
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class TestWorkersParts:
    def test_arrivals(self) -> None:
        seen = Arrivals(2)
        for index, total, now_ms in ((0, 1, 10), (1, 2, 12), (0, 1, 13), (0, 4, 15), (1, 3, 20)):
            seen.note(index, total, now_ms)
        assert seen.as_dict() == {"ttft_ms": [10, 12], "waits_ms": [5, 8], "arrivals": [3, 1]}

    def test_a_vocabulary_for_a_model_without_one(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        model, scratch = tmp_path / "model", tmp_path / "scratch"
        model.mkdir()
        scratch.mkdir()
        config = {"vocab_size": 700, "model_type": "llama", "bos_token_id": 0, "eos_token_id": 1}
        (model / "config.json").write_text(json.dumps(config))
        (model / "model.safetensors").write_bytes(b"weights")
        llama_convert._with_vocabulary(model, scratch)
        assert (scratch / "model.safetensors").read_bytes() == b"weights"
        tokenizer = AutoTokenizer.from_pretrained(scratch)
        assert len(tokenizer) == 700
        assert sorted(tokenizer.get_vocab().values()) == list(range(700))
        assert tokenizer.decode(tokenizer.encode("about any text: 100 €")) == "about any text: 100 €"

    def test_the_cache_follows_the_content(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        (tmp_path / "config.json").write_text("{}")
        first = llama_worker._digest(tmp_path)
        assert llama_worker._digest(tmp_path) == first
        (tmp_path / "README.md").write_text("words")
        assert llama_worker._digest(tmp_path) == first
        (tmp_path / "model.safetensors").write_bytes(b"weightz")
        assert llama_worker._digest(tmp_path) != first

    @pytest.mark.parametrize(
        ("config", "token"),
        [
            ({"pad_token_id": 2, "eos_token_id": 1}, 2),
            ({"pad_token_id": 1, "eos_token_id": [1, 5]}, 99),
            ({"pad_token_id": None, "eos_token_id": 1}, 99),
        ],
    )
    def test_the_end_of_text_is_played_by_another_token(
        self, tmp_path: Path, config: dict[str, Any], token: int
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
        assert llama_worker._without_end(tmp_path)[-1].endswith(f"=int:{token}")

    def test_float32_is_float32_throughout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llama_worker, "_gguf", lambda home, folder, dtype, cache: f"{folder}-{dtype}")
        request = {"model": "m", "draft": "d", "mode": "draft-simple", "dtype": "float32", "threads": 3}
        request |= {"max_batch": 4, "max_model_len": 100, "options": {"draft_tokens": 8}, "cache": ""}
        command = llama_worker._command(tmp_path, request)
        pairs = dict(zip(command, command[1:], strict=False))
        assert {pairs[flag] for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd")} == {"f32"}
        assert (pairs["-fa"], pairs["-md"]) == ("off", "d-float32")
        assert (pairs["-t"], pairs["-tb"], pairs["-td"], pairs["-tbd"]) == ("3", "3", "3", "3")
        assert (pairs["-c"], pairs["-np"], pairs["--spec-draft-n-max"]) == ("400", "4", "8")


# -- the real ones, where they are built

NEW_TOKENS = 48
CASES = [
    pytest.param(name, mode, batch, id=f"{name}-{mode}-{batch}")
    for name, kind in PEERS.items()
    for mode, facts in kind.modes.items()
    if not facts.head
    for batch in (1, 3)
    if facts.max_batch is None or batch <= facts.max_batch
]
CHATS = (
    "What is 2+2?",
    "CREATE TABLE players (name, team, number)\nQuestion: Who wears number 7?\nSQL:",  # whose answer ends early
    "The cat sat on the mat. The cat sat on the mat. The cat",
)


@pytest.fixture(scope="module")
def embedded() -> tuple[Path, Path, list[list[int]], dict[bool, list[list[int]]]]:
    """Target, draft, prompts, and this engine's own float32 ids with the end of text ignored, and not."""
    from transformers import AutoTokenizer

    target, draft = find("paceline-small"), find("paceline-small-draft")
    assert target is not None and draft is not None
    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]
    llm = LLM(str(target), dtype="float32")
    ids = {}
    for ignore_eos in (True, False):
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=ignore_eos)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        ids[ignore_eos] = [list(output.outputs[0].token_ids) for output in outputs]
    return target, draft, prompts, ids


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PEERS)
def test_a_random_model_without_a_tokenizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_PEERS", raising=False)
    reason = peers.available(name)
    if reason:
        pytest.skip(reason)
    prompt = list(range(10, 40))
    with materialised("random:2x128x256x700") as folder:
        llm = LLM(folder, dtype="float32")
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        ours = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
        method = Method(name="m", engine=name, dtype="float32")
        with Peer(method, folder, threads=1, max_model_len=128) as peer:
            assert peer.run([prompt], NEW_TOKENS, True).outputs == [list(ours)]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "mode", "batch"), CASES)
def test_float32_ids_of_a_peer_are_ours(
    name: str,
    mode: str,
    batch: int,
    embedded: tuple[Path, Path, list[list[int]], dict[bool, list[list[int]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same weights, the same arithmetic: what a conversion or an option got wrong shows as another token."""
    monkeypatch.delenv("PACELINE_PEERS", raising=False)
    reason = peers.available(name)
    if reason:
        pytest.skip(reason)
    target, draft, prompts, ours = embedded
    assert {len(ids) for ids in ours[True]} == {NEW_TOKENS}
    assert any(len(ids) < NEW_TOKENS for ids in ours[False])  # an end of text is met
    method = Method(name="m", engine=name, drafter=mode, dtype="float32")
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    with Peer(method, target, draft, threads=1, max_model_len=256, max_batch=batch) as peer:
        for ignore_eos, expected in ours.items():
            results = [peer.run(group, NEW_TOKENS, ignore_eos) for group in groups]
            assert [ids for result in results for ids in result.outputs] == expected
            if mode != "plain":
                assert all(0 <= r.accepted <= r.drafted for r in results)
            assert all(t > 0 for r in results for t in r.ttft_ms or [1.0])


# -- in a run


def config(**changes: Any) -> BenchConfig:
    """Seconds of work: two short prompts."""
    values: dict[str, Any] = {"model": "paceline-small", "workloads": ("wikisql",), "prompts": 2, "repeats": 2}
    return BenchConfig(**{**values, "max_new_tokens": 8, "threads": 1, **changes})


def run(asked: BenchConfig, progress: Progress | None = None) -> Report:
    return peer_runs.PeerRun(asked, progress=progress).execute()


class FakePeer:
    """Stands for a peer's process: answers with zeros, fails on demand."""

    fail_after: int | None = None
    made: list[FakePeer] = []

    def __init__(self, method: Method, *folders: Any, **options: Any) -> None:
        if method.drafter == "ngram-mod":
            raise PeerError("it does not start: no such flag")
        self.configs = [json.loads((folder / "config.json").read_text()) for folder in folders if folder is not None]
        self.version = "1.2"
        self.runs = 0
        self.paused = True
        self.closed = False
        self.made.append(self)

    def run(self, prompts: list[Any], max_new_tokens: int, ignore_eos: bool) -> PeerResult:
        self.runs += 1
        if self.runs == self.fail_after:
            raise PeerError("it ended")
        outputs = [[0] * max_new_tokens for _ in prompts]
        return PeerResult(outputs=outputs, wall_ms=10.0, ttft_ms=[1.0] * len(prompts))

    def pause(self) -> None:
        self.paused = True

    def close(self) -> None:
        self.closed = True


class TestPeers:
    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakePeer.made, FakePeer.fail_after = [], None
        monkeypatch.setattr(peer_runs, "Peer", FakePeer)
        built = {"transformers": "it is not built", "llama.cpp": None, "vllm": None}
        monkeypatch.setattr(peer_runs, "available", lambda name: built[name])

    def test_peers_run_in_turns_and_one_that_cannot_says_why(self) -> None:
        texts = ["plain", "llama.cpp/plain", "llama.cpp/ngram-mod", "transformers/plain"]
        seen: list[str] = []
        progress = lambda text, trials: seen.append(text.partition(", ")[2]) if trials else None  # noqa: E731
        report = run(config(methods=tuple(peer_runs.read_methods(texts))), progress)
        assert report.unavailable == {
            "llama.cpp/ngram-mod": "it does not start: no such flag",
            "transformers/plain": "it is not built",
        }
        assert seen[:4] == ["plain", "llama.cpp/plain", "llama.cpp/plain", "plain"]
        theirs = [t for t in report.trials if t.method == "llama.cpp/plain"]
        assert len(theirs) == 4 and all(t.wall_ms == 10.0 and t.tokens == 8 and t.passes == 8 for t in theirs)
        assert all(t.cell.ignore_eos for t in report.trials)  # so that all give the same number of tokens
        assert report.versions["llama.cpp"] == "1.2"
        assert all(peer.closed and peer.paused for peer in FakePeer.made if peer.runs)

    def test_a_peer_that_fails_on_the_way_stops_nothing(self) -> None:
        FakePeer.fail_after = 3
        report = run(config(methods=tuple(peer_runs.read_methods(["plain", "vllm/plain"]))))
        assert report.unavailable == {"vllm/plain": "it ended"}
        counts = Counter(t.method for t in report.trials)
        assert counts == {"plain": 4, "vllm/plain": 1}  # one warm-up, one trial, then the end

    @pytest.mark.parametrize(("text", "times"), [("llama.cpp/plain", 2), ("llama.cpp/draft-simple;dtype=q4_0", 1)])
    def test_they_get_the_stretched_model_and_heads_to_quantise(self, text: str, times: int) -> None:
        texts = ["plain", "draft_model:paceline-small-draft", text]
        model = f"stretch:paceline-small,times={times}" if times > 1 else "paceline-small"
        run(config(model=model, methods=tuple(peer_runs.read_methods(texts)), repeats=1, prompts=1))
        given = [(said["num_hidden_layers"], said["tie_word_embeddings"]) for said in FakePeer.made[0].configs]
        assert given == [(12 * times, False), (2, False)]

    def test_peers_are_left_out_where_they_cannot_be_compared(self) -> None:
        methods = tuple(peer_runs.read_methods(["plain", "llama.cpp/plain"]))
        report = run(config(methods=methods, temperatures=(0.0, 0.8), repeats=1))
        assert {t.cell.temperature for t in report.trials if t.method == "llama.cpp/plain"} == {0.0}


# -- as a user writes them


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("llama.cpp/ngram-mod", Method(name="llama.cpp/ngram-mod", engine="llama.cpp", drafter="ngram-mod")),
        (
            "v=vllm/ngram;num_speculative_tokens=4;dtype=float32",
            Method(name="v", engine="vllm", drafter="ngram", settings={"num_speculative_tokens": 4}, dtype="float32"),
        ),
        ("fast=ngram,depth=4", Method(name="fast", drafter="ngram,depth=4")),
    ],
)
def test_modes_are_written_as_methods(text: str, wanted: Method) -> None:
    assert read_methods([text]) == [wanted]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lama.cpp/plain", "id you mean 'llama.cpp'"),
        ("llama.cpp/ngram", "no mode 'ngram'"),
        ("llama.cpp/plain;depth=3", "no option 'depth'"),
    ],
)
def test_modes_that_are_not_there(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_methods([text])


def test_every_mode_of_a_peer() -> None:
    names = [m.name for m in peer_methods(["transformers"])]
    assert names == ["transformers/plain", "transformers/assisted", "transformers/prompt_lookup"]
    with pytest.raises(ConfigError, match="no peer .transformer"):
        peer_methods(["transformer"])


# -- beside ours


def test_against_holds_every_method_against_every_peer() -> None:
    report = World().report()
    summary = Summary(report)
    found = peer_runs.against(summary, summary.sections[0])
    assert list(found) == ["llama.cpp", "transformers"]
    assert found["llama.cpp"]["transformers"].value == pytest.approx(1 / found["transformers"]["llama.cpp"].value)
    assert found["transformers"]["plain"].value > 2  # 5.8 ms a pass against 2.1
    assert "llama.cpp" not in found["llama.cpp"]


def test_agreement_is_counted_and_the_fastest_peer_named() -> None:
    report = World().report()
    found = replace(report.exactness[0], method="llama.cpp", identical=2, failures=[{"prompt": "x", "what": "y"}])
    report.exactness.append(found)
    assert peer_runs.agreement_line(report) == "peers' ids equal our plain decoding: 2 of 5 sequences"
    assert str(peer_runs.peer_headline(Summary(report))).startswith("Against the fastest peer: hybrid is ")
