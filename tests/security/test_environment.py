"""Of the trainer's environment nodes of a cluster get what is named, and nothing that may be a credential."""

from __future__ import annotations

import pickle

import pytest

from stoker.workers.protocol import WorkerSpec
from stoker_ray.shipment import Shipment, pickled_spec

SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_KEY",
    "COMET_API_KEY",
    "DATABASE_URL",
    "GITHUB_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "KUBECONFIG",
    "MLFLOW_TRACKING_PASSWORD",
    "OPENAI_API_KEY",
    "PGPASSWORD",
    "PYTHONPATH",
    "RAY_AUTH_TOKEN",
    "SSH_AUTH_SOCK",
    "STOKER_RUN",
    "WANDB_API_KEY",
    "http_proxy",
    "no name that anybody knows",
)
SENT = {
    "OMP_NUM_THREADS": "3",
    "LC_ALL": "C.UTF-8",
    "TZ": "Asia/Tokyo",
    "HF_HOME": "/models",
    "PYTHONHASHSEED": "7",
    "RANK": "1",
}


def test_credentials_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    for name, value in SENT.items():
        monkeypatch.setenv(name, value)
    shipment = Shipment.of(pickled_spec(WorkerSpec(0, [1, 2], True, list, False, 0, None, 1, None, True)))
    assert SENT.items() <= shipment.variables.items()
    assert not set(SECRETS) & set(shipment.variables)
    sources = shipment.sources, shipment.modules  # this file, where the word is written
    assert b"hunter2" not in pickle.dumps([x for x in vars(shipment).values() if not any(x is y for y in sources)])
