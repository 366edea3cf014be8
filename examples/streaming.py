"""An answer as it is written, and a conversation: what each step brought, and how much of it was drafted."""

from __future__ import annotations

from collections.abc import Iterator

from paceline import LLM, Chunk, SamplingParams


def show(chunks: Iterator[Chunk]) -> str:
    """Print the chunks as they come; the whole text."""
    text = ""
    for chunk in chunks:
        # A chunk is what one step brought: the accepted tokens, if any, and then one of the target's own.
        accepted = sum(origin == "drafted" for origin in chunk.origins)
        print(f"{chunk.text!r} {accepted} of {len(chunk.token_ids)} drafted", flush=True)
        text += chunk.text
        if chunk.output is not None:  # the last chunk brings the whole answer
            print(chunk.output.stats.summary())
    return text


def main() -> None:
    llm = LLM("paceline-small", drafter="draft_model:paceline-small-draft")
    greedy = SamplingParams(temperature=0, max_tokens=32)
    text = show(llm.stream("It was a dark night, and", greedy))
    assert text

    question = "CREATE TABLE players (name, team, number)\nQuestion: Who wears number 7?\nSQL:"
    messages = [{"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": show(llm.chat(messages, greedy, stream=True))})

    # Leaving the loop early ends the request: its memory is free again.
    seen = 0
    for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=1000)):
        seen += len(chunk.token_ids)
        if seen >= 8:
            break
    assert not llm.engine.busy


if __name__ == "__main__":
    main()
