"""Token trees, verification, sampling, requests: functions of tensors and data. Imports torch and pydantic only."""
