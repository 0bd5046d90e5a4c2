"""Options of timm's train.py and validate.py of v1.0.28, which are not in its wheel."""

OPTIONS = {
    *("--device-modules", "--config", "--data-dir", "--model", "--model-kwargs", "--output", "--experiment"),
    *("--split", "--checkpoint", "--pretrained", "--crop-pct", "--interpolation", "--epochs", "--initial-checkpoint"),
    *("--kd-model-name", "--kd-distill-type", "--kd-token-distill-type", "--task-loss-weight"),
    *("--batch-size", "--opt", "--lr", "--weight-decay", "--sched", "--decay-epochs", "--warmup-epochs", "--smoothing"),
    *("--num-classes", "--drop-path", "--workers", "--amp", "--device", "--resume", "--recovery-interval"),
    *("--log-wandb", "--wandb-project", "--wandb-tags", "--wandb-resume-id"),
}
