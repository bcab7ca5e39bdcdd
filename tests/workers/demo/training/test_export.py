"""Does a served checkpoint compute what was trained, to the rounding of its weights?"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import Numerics
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.export import export
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.model_runner import load_runner
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

LENGTH = 256


def noisy_parameters(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Initial ones, moved, so that no sublayer is silent; as bf16 holds them."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, values in initial_parameters(config, 0).items():
        noise = torch.randn(values.shape, generator=generator)
        parameters[name] = values + 0.05 * noise
        if "hc_" not in name and not name.endswith(("attn_sink", "gate.bias")):
            parameters[name] = parameters[name].to(torch.bfloat16).float()
    return parameters


def test_workers_load_what_training_exports(tmp_path: Path) -> None:
    document = config_of(Size.TINY)
    config = ModelConfig.from_dict(document)
    parameters = noisy_parameters(config)
    export(tmp_path / "checkpoint", document, parameters)
    readable = tmp_path / "readable"
    readable.touch()
    modes = {path.stat().st_mode for path in (readable, *(tmp_path / "checkpoint").iterdir())}
    assert len(modes) == 1  # as the umask has it, so that other users' workers can read it
    tokens = torch.randint(3, 4096, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    ids = compressed_ids(Tokenizer.from_file(str(TOKENIZER)))
    model = TrainableModel(config, parameters, ids, packed=False)
    with torch.no_grad():
        trained = model.logits(model.forward(tokens).hidden)[0]
    runner = load_runner(
        tmp_path / "checkpoint",
        Half.ALL,
        num_blocks=LENGTH // config.sliding_window,
        num_slots=1,
        numerics=Numerics.FAST,
        kv_format=KVFormat.FLOAT32,
    )
    step = SequenceStep(
        slot=0,
        block_table=tuple(range(LENGTH // config.sliding_window)),
        token_ids=tuple(tokens[0].tolist()),
        decoder_stop=LENGTH,
        return_logits=True,
    )
    served = runner.execute(StepPlan(0, (step,))).logits[0]
    assert (served - trained).abs().max() < 1e-3 * trained.std()
