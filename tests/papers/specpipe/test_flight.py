"""The tree in flight against a reference that replays everything, by the tokens of whole paths."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kits.masks import append_layer, kept_cache, pruned, subtree

from paceline.model.stages import TEXT, Stage
from paceline.papers.specpipe.flight import NONE, Cut, InFlightTree, Offer

Path = tuple[int, ...]  # all tokens of the text up to a node's own


@dataclass
class Replay:
    """What a list of events comes to, from its beginning, without numbers, versions or rows."""

    text: Path  # up to the root
    nodes: set[Path] = field(default_factory=set)
    entered: list[Path] = field(default_factory=list)
    said: list[bool] = field(default_factory=list)  # of each verdict whether it was in flight

    @staticmethod
    def of(events: list[tuple[str, Any]]) -> Replay:
        found = Replay((0,), {(0,)})
        for name, value in events:
            getattr(found, name)(value)
        return found

    def extend(self, path: Path) -> None:
        assert path[:-1] in self.nodes
        self.nodes.add(path)

    def enter(self, path: Path) -> None:
        self.entered.append(path)

    def say(self, token: int) -> None:
        self.text += (token,)
        self.said.append(self.text in self.entered)
        self.nodes = {path for path in self.nodes if path[: len(self.text)] == self.text} | {self.text}
        self.entered = [path for path in self.entered if path[: len(self.text)] == self.text]


@dataclass
class World:
    """A tree, its events, a store that holds the path of every row, and frames with stages that hear late."""

    rng: random.Random
    tree: InFlightTree = field(default_factory=lambda: InFlightTree(0, 0))
    events: list[tuple[str, Any]] = field(default_factory=list)
    store: list[Path] = field(default_factory=list)
    committed: int = 0
    frames: list[tuple[int, list[int], list[Path]]] = field(default_factory=list)
    verdicts: list[Cut] = field(default_factory=list)
    text: Path = (0,)

    def path(self, number: int) -> Path:
        below = [self.tree.nodes[n].token for n in (self.tree.root, *self.tree.path(number))]
        return self.text[:-1] + tuple(below)

    def extend(self) -> None:
        parents = self.rng.choices([*self.tree.nodes], k=self.rng.randint(1, 4))
        for parent in parents:
            token = self.rng.randrange(3)
            self.events.append(("extend", (*self.path(parent), token)))
            self.tree.extend([Offer(parent, token, -self.rng.random())])

    def enter(self) -> None:
        version, level = self.tree.version, self.tree.enter(self.rng.randint(1, 5))
        paths = [self.path(number) for number in level]
        for number, path in zip(level, paths, strict=True):
            assert self.tree.nodes[number].row + self.committed == len(self.store)
            self.store.append(path)
            self.events.append(("enter", path))
        self.frames.append((version, level, paths))

    def say(self) -> None:
        if self.tree.nodes[self.tree.root].row == NONE:
            with pytest.raises(ValueError, match="not entered"):
                self.tree.say(0)
            return
        token = self.rng.randrange(3)
        verdict = self.tree.say(token)
        self.text += (token,)
        self.events.append(("say", token))
        self.verdicts.append(verdict)
        self.store[self.committed :] = [self.store[self.committed + row] for row in verdict.rows]
        self.committed += 1

    def check(self) -> None:
        expected = Replay.of(self.events)
        assert {self.path(number) for number in self.tree.nodes} == expected.nodes
        assert self.path(self.tree.root) == expected.text == self.text
        entered = {self.tree.nodes[n].row: self.path(n) for n in self.tree.nodes if self.tree.nodes[n].row != NONE}
        assert [entered[row] for row in range(len(entered))] == expected.entered
        assert [verdict.hit for verdict in self.verdicts] == expected.said
        assert self.store == [self.text[: i + 1] for i in range(self.committed)] + expected.entered
        assert self.tree.rows == len(expected.entered) and self.tree.version == len(expected.said)
        for number, node in self.tree.nodes.items():
            assert node.place == len(self.path(number)) - 1
            assert number == self.tree.root or (node.row == NONE) >= (self.tree.nodes[node.parent].row == NONE)


@pytest.mark.parametrize("seed", range(60))
def test_trees_rows_and_late_stages_are_what_a_replay_finds(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(60):
        rng.choices([world.extend, world.enter, world.say], [3, 4, 3])[0]()
        world.check()
    assert len(world.verdicts) > 3
    for version, level, paths in world.frames:  # a stage that hears of some verdicts, in any order
        told = rng.sample(world.verdicts, rng.randint(0, len(world.verdicts)))
        stage = Stage.__new__(Stage)
        stage.forget(0)
        for verdict in told:
            stage.tell(1, verdict.version, verdict.alive)
        newest = max([verdict.version for verdict in told], default=0)
        text = world.text[: newest + 1]
        left = [i for i, path in enumerate(paths) if version >= newest or path[: len(text)] == text]
        assert [*stage.rows_left(1, version, level)] == left
        assert [*stage.rows_left(1, version, [TEXT, *level])] == [0, *(row + 1 for row in left)]


@pytest.mark.parametrize("seed", range(20))
def test_the_papers_masks_keep_the_same_tokens(seed: int) -> None:
    """A matrix that grows by layers and is pruned by the column rule, and a cache by row OR column, beside the tree."""
    rng = random.Random(seed)
    tree = InFlightTree(0, 0)
    (root,) = tree.enter(1)
    order, mask = [root], torch.ones(1, 1, dtype=torch.bool)  # of the tree
    held, cache = [root], mask  # of a device, which keeps what was said
    for _ in range(12):
        offers = [Offer(rng.choice(order), rng.randrange(4), -1.0) for _ in range(rng.randint(1, 5))]
        known = {*order}
        layer = [number for number in dict.fromkeys(tree.extend(offers)) if number not in known]
        tree.enter(len(layer))
        above = [tree.nodes[number].parent for number in layer]
        mask = append_layer(mask, [order.index(number) for number in above])
        cache = append_layer(cache, [held.index(number) for number in above])
        order, held = order + layer, held + layer
        for i, number in enumerate(order):
            assert {order[j] for j in mask[i].nonzero()[:, 0].tolist()} == {tree.root, *tree.path(number)}
        child = rng.choice([number for number in order if tree.nodes[number].parent == tree.root])
        keep, stays = subtree(mask, order.index(child)), kept_cache(cache, held.index(child))
        verdict = tree.say(tree.nodes[child].token)
        order, mask = [n for n, kept in zip(order, keep, strict=True) if kept], pruned(mask, keep)
        assert {*order} == verdict.alive and torch.equal(mask, mask.tril())
        said = len(held) - len([n for n in held if n in order])
        held, cache = [n for n, kept in zip(held, stays, strict=True) if kept], pruned(cache, stays)
        text = [n for n in held if n not in order]
        assert len(text) == tree.version <= said  # all that was said, and nothing else
        assert held[len(text) :] == sorted(order, key=lambda n: tree.nodes[n].row)
        assert len(verdict.rows) == 1 + len(order)
        if len(order) == 1:
            order, mask = [tree.root], torch.ones(1, 1, dtype=torch.bool)
