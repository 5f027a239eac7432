"""Real jobs of transformers' Trainer: trained, saved by it, and resumed by it."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 32
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 2},
}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen rows of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        row = torch.randint(VOCABULARY, (6,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": row, "labels": row}


def model_of(seed: int) -> Any:
    """A tied Llama: two tensors of one shape in each layer, biases on none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def trainer_of(folder: str, kind: str, seed: int, steps: int) -> Any:
    """A Trainer that saves after two steps."""
    from transformers import Trainer, TrainingArguments

    more: dict[str, Any] = {}
    if kind.startswith("zero"):
        stage = {"stage": int(kind[4]), "memory_efficient_linear": False}
        more = {"deepspeed": {**DEEPSPEED, "zero_optimization": stage}}
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        save_steps=2,
        save_strategy="steps",
        per_device_train_batch_size=2,
        learning_rate=0.01,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=7,
        disable_tqdm=True,
        **more,
    )
    return Trainer(model_of(seed), arguments, train_dataset=Rows())


def run(
    rank: int, world: int, kind: str, folder: str, steps: int, resume: str | None
) -> dict[str, Any]:
    """Train from the start, or from what is resumed, up to a step: losses by step, weights at the end."""
    import dynadapt

    trainer = trainer_of(folder, kind, seed=5 if resume else 0, steps=steps)
    trainer.train(resume_from_checkpoint=resume)
    losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    engine = trainer.model_wrapped
    state = (
        engine
        if kind.startswith("zero")
        else dynadapt.TrainState(trainer.model, trainer.optimizer.optimizer)
    )
    return {"losses": losses, "fingerprint": dynadapt.fingerprint(state)}
