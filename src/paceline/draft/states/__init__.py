"""What drafters share that draft the target's last states: one decoder layer, fed with states and tokens."""
