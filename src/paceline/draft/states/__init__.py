"""Parts of drafters that draft the target's last states: one decoder layer, fed with states and tokens."""
