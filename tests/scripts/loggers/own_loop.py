"""A loop of one's own that logs with ``DataMonitor`` to the logger that is named."""

import sys

from torch.utils.data import DataLoader

from stoker.integrations.monitor import DataMonitor


def tensorboard():
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter("tensorboard")


def unwritable():
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(__file__ + "/folder")


def wandb():
    import wandb

    return wandb.init(project="p", mode="offline")


def no_key():
    import wandb

    return wandb.init(project="p", mode="online", settings=wandb.Settings(login_timeout=2, init_timeout=5))


def no_network():
    import wandb

    return wandb.init(project="p", mode="online", settings=wandb.Settings(api_key="0" * 40, init_timeout=5,
                      base_url="http://127.0.0.1:9"))  # fmt: skip


def mlflow():
    import mlflow

    mlflow.set_tracking_uri("file:mlruns")
    mlflow.start_run()
    return mlflow


def no_server():
    import mlflow

    mlflow.set_tracking_uri("http://127.0.0.1:9")
    mlflow.start_run()
    return mlflow


if __name__ == "__main__":
    with DataMonitor(globals()[sys.argv[1]]) as monitor:
        for epoch in range(2):
            for _ in DataLoader(range(64), batch_size=4):
                pass
            monitor.log(epoch)
    print("trained")
