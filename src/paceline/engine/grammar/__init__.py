"""Grammars that outputs must meet, by llguidance: compiled once, followed token by token."""

from .compiler import Grammars as Grammars
