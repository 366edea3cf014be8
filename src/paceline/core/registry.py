"""Name what is loaded by its name: drafters, rounds, and what papers add to the model.

Named, not imported: listing the names must not load torch, and nothing outside of `paceline.papers` imports a paper.
"""

from __future__ import annotations

DRAFTERS = {
    "none": "paceline.draft.none:NoneConfig",
    "ngram": "paceline.draft.ngram:NgramConfig",
    "suffix": "paceline.draft.suffix:SuffixConfig",
    "prediction": "paceline.draft.prediction:PredictionConfig",
    "grammar": "paceline.draft.forced:ForcedConfig",
    "draft_model": "paceline.draft.draft_model:DraftModelConfig",
    "medusa": "paceline.draft.medusa:MedusaConfig",
    "hybrid": "paceline.draft.hybrid:HybridConfig",
    "streams": "paceline.papers.streaming.drafter:StreamsConfig",
    "lyanna": "paceline.papers.lyanna.drafter:LyannaConfig",
    "eagle": "paceline.draft.eagle:EagleConfig",
    "magicdec": "paceline.draft.magicdec:MagicDecConfig",
    "spire": "paceline.papers.spire.drafter:SpireConfig",
}
ROUNDS = {
    "serial": "paceline.engine.draft_verify:SerialConfig",
    "fused": "paceline.papers.streaming.round:FusedConfig",
    "mirror": "paceline.papers.mirror.config:MirrorConfig",
    "pipeline": "paceline.papers.specpipe.config:PipelineConfig",
}
APPLICATIONS = "paceline.papers.streaming.application"  # reads the files of an application
TRACKS = "paceline.papers.mirror.tracks"  # drafts of several tracks
