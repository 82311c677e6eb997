"""The words of Hugging Face's TrainingArguments and of the scripts around them, old and new, and our keys for them.

The same table serves files that are trained as they are, files that are translated, and the hints for unknown keys.
"""

from __future__ import annotations

from shoal.config.foreign.conversions import (
    PRECISIONS,
    by_name,
    clip,
    deepspeed,
    epochs,
    eval_steps,
    eval_strategy,
    half,
    load_best,
    max_steps,
    metric,
    mode,
    only,
    recompute,
    report_to,
    resume,
    save_steps,
    save_strategy,
    steps,
    warmup_ratio,
    warmup_steps,
)
from shoal.config.foreign.names import optimizer, optimizer_option, schedule
from shoal.config.foreign.rules import Idle, Rule, Rules, idle

_OFF = "it is off anyway"
_UPLOAD = "a run uploads nothing; use `shoal checkpoint export --push` when it has ended"
_BY_STEPS = "the log is written every logging_steps steps"

WORDS: Rules = {
    # How long, and in which batches
    "output_dir": Rule("experiment.output_dir"),
    "run_name": Rule("experiment.name"),
    "seed": Rule("experiment.seed"),
    "full_determinism": Rule("experiment.deterministic"),
    "num_train_epochs": Rule("training.num_epochs", epochs),
    **dict.fromkeys(("max_steps", "max_train_steps"), Rule("training.max_steps", max_steps)),
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_gpu_train_batch_size", "train_batch_size"), Rule("training.batch_size")
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size"), Rule("training.eval_batch_size")
    ),
    "gradient_accumulation_steps": Rule("training.gradient_accumulation"),
    **dict.fromkeys(("num_gpus", "devices"), Rule("launch.procs_per_node", why="On each machine. `auto`: every GPU.")),
    # Optimizer and schedule
    "learning_rate": Rule("training.learning_rate"),
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_scheduler", "lr_scheduler_kwargs"),
        Rule("training.lr_scheduler", lambda value, section: schedule(section)),
    ),
    **dict.fromkeys(
        ("warmup_steps", "lr_warmup_steps"),
        Rule(("training.warmup_steps", "training.warmup_ratio"), warmup_steps, "Below 1 it is a share of all steps."),
    ),
    "warmup_ratio": Rule("training.warmup_ratio", warmup_ratio),
    **dict.fromkeys(("weight_decay", "adam_weight_decay"), Rule("training.weight_decay")),
    "optim": Rule("training.optimizer", lambda value, section: optimizer({**section, "optim": value})),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), Rule("training.optimizer", optimizer_option)),
    "use_8bit_adam": Rule(
        "training.optimizer",
        lambda value, section: optimizer({**section, "optim": "adamw_8bit"}) if value else Idle(_OFF),
    ),
    "optim_args": Rule(why="shoal takes options one by one; write them into training.optimizer: {name: ...}"),
    "optim_target_modules": Rule(why="the optimizers that have it are not in shoal"),
    "max_grad_norm": Rule("training.max_grad_norm", clip, "0 means no clipping, which is null here."),
    # Logging, evaluating, saving
    "logging_steps": Rule("logging.every", steps),
    "logging_strategy": only("steps", _BY_STEPS, "the log is written by steps; give logging_steps"),
    "report_to": Rule(("logging.tensorboard", "logging.wandb", "logging.mlflow"), report_to),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"), Rule(("training.eval_steps", "training.eval_epochs"), eval_strategy)
    ),
    "eval_steps": Rule("training.eval_steps", eval_steps),
    "validation_epochs": Rule("training.eval_epochs"),
    "validation_prompts": Rule("dataset.validation_prompts"),
    "save_strategy": Rule(("checkpoint.every", "checkpoint.every_epochs", "checkpoint.keep_best"), save_strategy),
    **dict.fromkeys(("save_steps", "checkpointing_steps"), Rule("checkpoint.every", save_steps)),
    **dict.fromkeys(("save_total_limit", "checkpoints_total_limit"), Rule("checkpoint.keep_last")),
    "load_best_model_at_end": Rule(("checkpoint.load_best_model_at_end", "checkpoint.keep_best"), load_best),
    "metric_for_best_model": Rule(("checkpoint.metric", "checkpoint.mode"), metric),
    "greater_is_better": Rule("checkpoint.mode", mode),
    "resume_from_checkpoint": Rule("checkpoint.resume", resume),
    # Precision, memory, speed
    "bf16": Rule("training.mixed_precision", half("bf16")),
    "fp16": Rule("training.mixed_precision", half("fp16")),
    "mixed_precision": Rule("training.mixed_precision", by_name(PRECISIONS)),
    **dict.fromkeys(("tf32", "allow_tf32"), Rule("training.tf32")),
    "gradient_checkpointing": Rule("training.activation_checkpointing", recompute),
    "gradient_checkpointing_kwargs": idle("blocks are never recomputed in the reentrant way"),
    "torch_compile": Rule("training.compile"),
    "torch_compile_backend": only(
        "inductor", "it is the backend of training.compile", "blocks are compiled by inductor; leave it out"
    ),
    "torch_compile_mode": only(
        "default", "it is the mode of training.compile", "blocks are compiled in the default mode; leave it out"
    ),
    **dict.fromkeys(
        ("use_cpu", "no_cuda"),
        Rule(
            "training.device",
            lambda value, section: "cpu" if value is True else Idle(_OFF) if value is False else value,
        ),
    ),
    # Data
    "dataloader_num_workers": Rule("dataset.num_workers"),
    "dataloader_pin_memory": Rule(
        "dataset.pin_memory",
        lambda value, section: Idle("memory is pinned if there is a GPU") if value is True else value,
    ),
    "dataloader_drop_last": Rule(
        "dataset.drop_last", why="At the end of the run alone: batches continue across epochs."
    ),
    "dataloader_persistent_workers": Rule("dataset.persistent_workers"),
    "dataloader_prefetch_factor": Rule("dataset.prefetch"),
    # Processes
    "deepspeed": Rule(("distributed.strategy", "distributed.deepspeed.config_file"), deepspeed),
    "ddp_find_unused_parameters": Rule("distributed.ddp.find_unused_parameters"),
    "ddp_bucket_cap_mb": Rule("distributed.ddp.bucket_cap_mb"),
    "ddp_broadcast_buffers": Rule("distributed.ddp.broadcast_buffers"),
    "ddp_static_graph": Rule("distributed.ddp.static_graph"),
    "ddp_backend": Rule("distributed.backend"),
    "ddp_timeout": Rule("distributed.timeout"),
    # What shoal does another way, or not at all
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), idle("`shoal train` trains, and evaluates if there is evaluation data")
    ),
    "overwrite_output_dir": idle("a run resumes from what is in its folder; start anew with --fresh"),
    "logging_dir": idle("TensorBoard's files are in the run folder"),
    "project": idle("use logging.wandb.project"),
    "data_seed": Rule(why="one seed decides everything; use seed"),
    "average_tokens_across_devices": only(
        True, "tokens always have the same weight", "tokens always have the same weight; leave it out"
    ),
    "label_smoothing_factor": only(0, _OFF, "the loss is the cross-entropy; leave it out"),
    "neftune_noise_alpha": Rule(why="shoal adds no noise to embeddings; leave it out"),
    "auto_find_batch_size": only(False, _OFF, "batches keep their size; give per_device_train_batch_size"),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        only(False, _OFF, "shoal has no Liger kernels; use training.compile and training.loss_chunks"),
    ),
    "train_sampling_strategy": only(
        "random",
        "the order of samples is random",
        "the order of samples is random; use dataset.packing against padding",
    ),
    "group_by_length": only(False, _OFF, "the order of samples is random; use dataset.packing against padding"),
    "eval_on_start": only(False, _OFF, "a run is first evaluated after eval_steps"),
    "eval_delay": only(0, _OFF, "evaluations begin with the first eval_steps; leave it out"),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        only(False, _OFF, "an evaluation computes as the training does; leave it out"),
    ),
    "save_only_model": only(
        False, _OFF, "every checkpoint can be resumed from; `shoal checkpoint export` writes weights alone"
    ),
    "save_safetensors": only(True, "checkpoints are safetensors", "checkpoints are safetensors; leave it out"),
    "ignore_data_skip": only(False, _OFF, "a resumed run goes on with the samples it has not seen; leave it out"),
    "push_to_hub": only(False, _OFF, _UPLOAD),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        idle(_UPLOAD),
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp_config"), Rule(why="write it as a section fsdp: {enabled: true, sharding_strategy: FULL_SHARD}")
    ),
    **dict.fromkeys(("accelerator_config", "parallelism_config"), Rule(why="use the section distributed:")),
    "length_column_name": idle("samples are not grouped by length"),
    **dict.fromkeys(
        ("torch_empty_cache_steps", "skip_memory_metrics", "use_cache", "use_legacy_prediction_loop"),
        idle("it does not change the training, and shoal has no such switch"),
    ),
    **dict.fromkeys(
        (
            "logging_first_step",
            "logging_nan_inf_filter",
            "include_num_input_tokens_seen",
            "include_tokens_per_second",
            "log_on_each_node",
            "log_level",
            "log_level_replica",
            "disable_tqdm",
            "debug",
        ),
        idle("logging: says what the log has"),
    ),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), idle("shoal does not log to Trackio")
    ),
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
            "include_for_metrics",
            "include_inputs_for_metrics",
            "batch_eval_metrics",
        ),
        idle("an evaluation adds up loss and metrics batch by batch"),
    ),
    **dict.fromkeys(
        ("save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint"),
        idle("checkpoints are saved and resumed whole, also after a signal"),
    ),
    **dict.fromkeys(
        ("remove_unused_columns", "label_names", "dataloader_in_order", "dataloader_multiprocessing_context"),
        idle("the recipe decides what a batch has, and batches come in order"),
    ),
    **dict.fromkeys(
        (
            "local_rank",
            "half_precision_backend",
            "fp16_opt_level",
            "fp16_backend",
            "use_mps_device",
            "jit_mode_eval",
            "use_ipex",
            "past_index",
            "ray_scope",
            "tpu_num_cores",
            "dispatch_batches",
            "split_batches",
            "include_inputs",
        ),
        idle("it is old, or found out by itself"),
    ),
}
"""Rules by the words themselves, without a section."""
