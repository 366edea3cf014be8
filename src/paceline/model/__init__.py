"""The target model: one decoder, any range of whose layers can be run."""
