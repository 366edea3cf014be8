"""llama.cpp through its server: plain, a draft model, n-gram speculation."""

import ctypes
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worker_protocol import serve

TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "q4_0": "q4_0", "q8_0": "q8_0"}
IN_BLOCKS = ("q4_0", "q8_0")
OPTIONS = {  # of a mode, as the server names them
    "draft_tokens": "--spec-draft-n-max",
    "p_min": "--spec-draft-p-min",
    "n_match": "--spec-ngram-mod-n-match",
    "n_min": "--spec-ngram-mod-n-min",
    "n_max": "--spec-ngram-mod-n-max",
}
HOST = "127.0.0.1"


class Engine:
    def __init__(self, request):
        home = Path(request["home"])
        self.mode = request["mode"]
        self.command = _command(home, request)
        self.no_end = _without_end(Path(request["model"]))
        self.server = None
        self.seen = set()  # prompts that this server has answered
        self.ignore_eos = False
        self._start()
        version = subprocess.run([self.command[0], "--version"], capture_output=True, text=True, check=True)
        self.about = {"version": _version(home, version.stderr + version.stdout)}

    def _start(self):
        self.port = _free_port()
        command = [*self.command, *(self.no_end if self.ignore_eos else []), "--port", str(self.port)]
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        while True:
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.server.returncode}")
            try:
                connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)

    def _stop(self):
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None

    def _prepare(self, prompts, ignore_eos):
        """Start another server where this one would not do; that is not timed.

        - What ends a text is a property of a server (see `_without_end`).
        - The pool of ngram-mod outlives a request. A prompt that comes a second time would find its own answer
          there and be drafted from it; what other prompts left there is fair.
        """
        asked = {tuple(prompt) for prompt in prompts}
        if ignore_eos != self.ignore_eos or (self.mode == "ngram-mod" and asked & self.seen):
            self._stop()
            self.ignore_eos, self.seen = ignore_eos, set()
            self._start()
        self.seen |= asked

    def generate(self, prompts, max_new_tokens, ignore_eos):
        """Answer prompts one after the other, timed around the server's own call."""
        self._prepare(prompts, ignore_eos)
        bodies = [json.dumps(_completion(p, max_new_tokens, ignore_eos)).encode() for p in prompts]
        connections = [http.client.HTTPConnection(HOST, self.port) for _ in prompts]
        for connection in connections:
            connection.connect()
        began = time.perf_counter()
        if len(prompts) == 1:
            answers = [_ask(connections[0], bodies[0])]
        else:
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(_ask, connections, bodies))
        wall_ms = 1000 * (time.perf_counter() - began)
        ends = [1000 * (end - began) for _, end in answers]
        times = [answer["timings"] for answer, _ in answers]
        return {
            "outputs": [answer["tokens"] for answer, _ in answers],
            "wall_ms": wall_ms,
            # the server's own clock runs from a request's first token to its last
            "ttft_ms": [end - t["predicted_ms"] for end, t in zip(ends, times, strict=True)],
            "waits_ms": [],  # a stream of events would cost the server time
            "arrivals": [],
            "drafted": sum(t.get("draft_n", 0) for t in times),
            "accepted": sum(t.get("draft_n_accepted", 0) for t in times),
        }

    def close(self):
        self._stop()


def _completion(prompt, max_new_tokens, ignore_eos):
    return {
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "repeat_penalty": 1.0,
        "ignore_eos": ignore_eos,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def _ask(connection, body):
    """The answer, and when it was there."""
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    end = time.perf_counter()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"llama-server answered {response.status}: {text[:500].decode(errors='replace')}")
    return json.loads(text), end


def _command(home, request):
    threads, batch = str(request["threads"]), request["max_batch"]
    dtype, context = request["dtype"], request["max_batch"] * request["max_model_len"]
    command = [str(home / "build/bin/llama-server"), "-m", _gguf(home, request["model"], dtype, request["cache"])]
    command += ["--host", HOST, "-t", threads, "-tb", threads, "-c", str(context), "-np", str(batch)]
    # No prompt is kept from one request to the next, in the slots or beside them; no page, no fitting to a GPU.
    command += ["--cache-ram", "0", "--ctx-checkpoints", "0", "--no-ui", "--fit", "off"]
    if dtype == "float32":  # the default keeps K/V in 16 bits
        command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    if request["mode"] != "plain":
        command += ["--spec-type", request["mode"]]
    if request["mode"] == "draft-simple":
        command += ["-md", _gguf(home, request["draft"], dtype, request["cache"]), "-td", threads, "-tbd", threads]
        if dtype == "float32":
            command += ["-ctkd", "f32", "-ctvd", "f32"]
    for name, value in request["options"].items():
        command += [OPTIONS[name], str(value)]
    return command


def _without_end(folder):
    """Options under which the end of text is a token like any other.

    The server's own ``ignore_eos`` forbids the token, after which its text is another than everybody else's. So
    the role goes to the padding, which no trained model writes (where there is none, to the last token), and it
    is that one which is forbidden. End tokens that the server knows by name stay forbidden.
    """
    config = json.loads((folder / "config.json").read_text())
    token = config.get("pad_token_id")
    ends = config.get("eos_token_id")
    if token is None or token < 0 or token in (ends if isinstance(ends, list) else [ends]):
        token = config["vocab_size"] - 1
    return ["--override-kv", f"tokenizer.ggml.eos_token_id=int:{token}"]


def _gguf(home, folder, dtype, cache):
    """The model of a Hugging Face folder as a GGUF file, made once for each content."""
    target = Path(cache) / "models" / f"{_digest(Path(folder))}-{TYPES[dtype]}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{os.getpid()}-{target.name}")
        convert, converter = Path(__file__).with_name("llama_convert.py"), home / "source/vendor/llama.cpp"
        converter = converter / "convert_hf_to_gguf.py"
        plain = unfinished.with_suffix(".plain") if dtype in IN_BLOCKS else unfinished
        kind = "bf16" if dtype in IN_BLOCKS else TYPES[dtype]
        command = [sys.executable, str(convert), str(converter), folder, str(plain), kind]
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            if dtype in IN_BLOCKS:
                subprocess.run(_quantiser(home, plain, unfinished, dtype), check=True, stdin=subprocess.DEVNULL)
            unfinished.rename(target)
        finally:
            plain.unlink(missing_ok=True)
            unfinished.unlink(missing_ok=True)
    return str(target)


def _quantiser(home, plain, quantised, dtype):
    """Every product in one type, and embeddings as they are: how Paceline quantises a plain checkpoint."""
    options = ["--pure", "--token-embedding-type", "bf16", "--output-tensor-type", dtype]
    return [str(home / "build/bin/llama-quantize"), *options, str(plain), str(quantised), dtype.upper()]


def _digest(folder):
    """Of all that goes into the conversion: weights, configuration, tokenizer, and the converter's wrapper."""
    found = hashlib.sha256(Path(__file__).with_name("llama_convert.py").read_bytes())
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".json", ".model"):
            found.update(f"{file.name}:{file.stat().st_size}:".encode())
            with file.open("rb") as content:
                while block := content.read(1 << 22):
                    found.update(block)
    return found.hexdigest()[:24]


def _version(home, text):
    """What the server says, and the source package that it was built from."""
    packages = [file.name.removesuffix(".tar.gz") for file in (home / "download").glob("*.tar.gz")]
    # After "(" it names a commit: that of whatever repository the source was unpacked in.
    said = [line.split(":")[1].split("(")[0].strip() for line in text.splitlines() if line.startswith("version:")]
    return ", ".join(said + packages)


def _free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _die_with_parent():
    """On Linux the server ends when this worker does, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    serve(Engine)
