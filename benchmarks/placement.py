"""The balance of each placement for the shapes of real models: the table of benchmarks/results/placement_202611.md.

    python benchmarks/placement.py

Nothing is trained and no model is downloaded; the shapes follow from the architectures' rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import PLACEMENTS, ParameterSpec, Placement

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

NUM_PSERVERS = (2, 3, 4, 8)


def two_layer_net() -> Named:
    """Yield a wide input and a narrow hidden layer."""
    yield from (("w1", (10, 1000)), ("b1", (10, 1000)), ("w2", (1, 10)), ("b2", (1, 10)))


def small_cnn() -> Named:
    """Yield PyTorch's MNIST example: two convolutions, two linear layers."""
    yield from linear("conv1", (32, 1, 3, 3))
    yield from linear("conv2", (64, 32, 3, 3))
    yield from linear("fc1", (128, 9216))
    yield from linear("fc2", (10, 128))


def resnet18() -> Named:
    """Yield torchvision's resnet18."""
    return resnet((2, 2, 2, 2), bottleneck=False)


def resnet50() -> Named:
    """Yield torchvision's resnet50."""
    return resnet((3, 4, 6, 3), bottleneck=True)


def resnet(depths: tuple[int, ...], *, bottleneck: bool) -> Named:
    """Yield residual stages; convolutions have no bias and are followed by a batch norm."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    num_inputs = 64
    for stage, depth in enumerate(depths, start=1):
        width = 64 * 2 ** (stage - 1)
        num_outputs = width * 4 if bottleneck else width
        for index in range(depth):
            block = f"layer{stage}.{index}"
            convolutions = (
                [(width, num_inputs, 1, 1), (width, width, 3, 3), (num_outputs, width, 1, 1)]
                if bottleneck
                else [(width, num_inputs, 3, 3), (width, width, 3, 3)]
            )
            for i, shape in enumerate(convolutions, start=1):
                yield f"{block}.conv{i}.weight", shape
                yield from norm(f"{block}.bn{i}", shape[0])
            if index == 0 and (stage > 1 or num_inputs != num_outputs):  # a shortcut of another shape is projected
                yield f"{block}.downsample.0.weight", (num_outputs, num_inputs, 1, 1)
                yield from norm(f"{block}.downsample.1", num_outputs)
            num_inputs = num_outputs
    yield from linear("fc", (1000, num_inputs))


def vgg16() -> Named:
    """Yield torchvision's vgg16: most of its bytes are in the first linear layer, late in the model."""
    sizes = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    for i, (num_inputs, num_outputs) in enumerate(pairwise(sizes)):
        yield from linear(f"features.{i}", (num_outputs, num_inputs, 3, 3))
    for i, shape in enumerate(((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096))):
        yield from linear(f"classifier.{i}", shape)


def gpt2_small() -> Named:
    """Yield Hugging Face's gpt2; its head is the token embedding, so it is no parameter of its own."""
    yield "wte.weight", (50257, 768)
    yield "wpe.weight", (1024, 768)
    for i in range(12):
        yield from norm(f"h.{i}.ln_1", 768)
        yield from linear(f"h.{i}.attn.c_attn", (768, 3 * 768), bias=3 * 768)  # its linear layers are transposed
        yield from linear(f"h.{i}.attn.c_proj", (768, 768))
        yield from norm(f"h.{i}.ln_2", 768)
        yield from linear(f"h.{i}.mlp.c_fc", (768, 4 * 768), bias=4 * 768)
        yield from linear(f"h.{i}.mlp.c_proj", (4 * 768, 768), bias=768)
    yield from norm("ln_f", 768)


def bert_base() -> Named:
    """Yield Hugging Face's bert-base-uncased with its pooler."""
    for kind, size in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield f"embeddings.{kind}_embeddings.weight", (size, 768)
    yield from norm("embeddings.LayerNorm", 768)
    for i in range(12):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from linear(f"{layer}.attention.{part}", (768, 768))
        yield from norm(f"{layer}.attention.output.LayerNorm", 768)
        yield from linear(f"{layer}.intermediate.dense", (3072, 768))
        yield from linear(f"{layer}.output.dense", (768, 3072))
        yield from norm(f"{layer}.output.LayerNorm", 768)
    yield from linear("pooler.dense", (768, 768))


def vit_b_16() -> Named:
    """Yield torchvision's vit_b_16 for images of 224 x 224: 14 x 14 patches and the class token."""
    yield "class_token", (1, 1, 768)
    yield from linear("conv_proj", (768, 3, 16, 16))
    yield "encoder.pos_embedding", (1, 14 * 14 + 1, 768)
    for i in range(12):
        layer = f"encoder.layers.encoder_layer_{i}"
        yield from norm(f"{layer}.ln_1", 768)
        yield f"{layer}.self_attention.in_proj_weight", (3 * 768, 768)
        yield f"{layer}.self_attention.in_proj_bias", (3 * 768,)
        yield from linear(f"{layer}.self_attention.out_proj", (768, 768))
        yield from norm(f"{layer}.ln_2", 768)
        yield from linear(f"{layer}.mlp.0", (3072, 768))
        yield from linear(f"{layer}.mlp.3", (768, 3072))
    yield from norm("encoder.ln", 768)
    yield from linear("heads.head", (1000, 768))


def linear(name: str, weight: Shape, bias: int | None = None) -> Named:
    """Yield a weight and its bias, by default of the size of the weight's first dimension."""
    yield f"{name}.weight", weight
    yield f"{name}.bias", (weight[0] if bias is None else bias,)


def norm(name: str, size: int) -> Named:
    """Yield the scale and shift of a batch or layer norm."""
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


MODELS: dict[str, Callable[[], Named]] = {
    "two-layer net": two_layer_net,
    "small CNN": small_cnn,
    "ResNet-18": resnet18,
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "GPT-2 small": gpt2_small,
    "BERT-base": bert_base,
    "ViT-B/16": vit_b_16,
}


def model_parameters(model: str) -> list[ParameterSpec]:
    """Return the parameters of a model in its own order."""
    return [ParameterSpec(name, shape) for name, shape in MODELS[model]()]


def imbalance(
    parameters: list[ParameterSpec], num_pservers: int, placement: Placement, *, slice_parameters: bool
) -> float:
    """Return the largest share over the mean share: 1 is even, `num_pservers` is all on one."""
    plan = make_plan(parameters, num_pservers, placement=placement, slice_parameters=slice_parameters)
    shares = [plan.shard_bytes(pserver) for pserver in range(num_pservers)]
    return max(shares) * num_pservers / sum(shares)


def markdown_table() -> str:
    """Return one row for each model: the worst imbalance over `NUM_PSERVERS`, parameters sliced and whole."""
    columns = [(placement, slice_parameters) for slice_parameters in (True, False) for placement in PLACEMENTS]
    names = [placement if slice_parameters else f"{placement}, whole" for placement, slice_parameters in columns]
    lines = [f"| model | {' | '.join(names)} |", "|---|" + "--:|" * len(columns)]
    for model in MODELS:
        parameters = model_parameters(model)
        cells = [
            max(imbalance(parameters, n, placement, slice_parameters=slice_parameters) for n in NUM_PSERVERS)
            for placement, slice_parameters in columns
        ]
        lines.append(f"| {model} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
