# SPDX-License-Identifier: Apache-2.0
"""Speech and sound: encoders of transformers, and a conformer, Tacotron, vocoders and others written out here."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from zoo.model import Axis, Model, Shape, Tensors, generator

from suite.entry import Answers, Both, Entry, Size, at, made, noise
from suite.libraries import imported
from suite.recommenders import mlp
from suite.text import HEADS, INNER, LAYERS, WIDTH, transformer

WAVES = Both(((1, 8000), (2, 6400)), ((1, 16000), (32, 16000)))
WAVE_AXES = (Axis("batch", 1, 4), Axis("samples", 3200, 12800, 320))
FRAMES = Both(((1, 96), (3, 64)), ((1, 400), (32, 400)))
FRAME_AXES = (Axis("batch", 1, 4), Axis("frames", 32, 128, 8))
WAV2VEC = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "conv_dim": Both((64,) * 7, (512,) * 7),
    "num_conv_pos_embeddings": Both(32, 128),
    "num_conv_pos_embedding_groups": Both(4, 16),
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}


def _waves(name: str, kind: str, fields: dict[str, Any], rank: int = 1) -> Entry:
    def build(size: Size) -> Model:
        model = Answers(
            transformer(name, "Model", size, fields), ("input_values",), ("last_hidden_state",)
        )
        return made(model, noise(), at(size, WAVES), WAVE_AXES, ("input_values",))

    return Entry(kind, "misc", build, ("transformers",), rank)


class Conformer(nn.Module):
    """Gulati et al. 2020: half a feed-forward, attention, convolution, the other half; 80 mel bands in."""

    def __init__(self, width: int, layers: int, heads: int, kernel: int = 15) -> None:
        super().__init__()
        self.head = nn.Sequential(
            nn.Conv1d(80, width, 3, 2, 1), nn.SiLU(), nn.Conv1d(width, width, 3, 2, 1), nn.SiLU()
        )
        self.layers = nn.ModuleList(ConformerLayer(width, heads, kernel) for _ in range(layers))
        self.scores = nn.Linear(width, 200)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.head(features.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return (functional.log_softmax(self.scores(x), dim=-1),)


class ConformerLayer(nn.Module):
    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.widen, self.narrow = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.feeds[0](self.norms[0](x)) / 2
        y = self.norms[1](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = functional.glu(self.widen(self.norms[2](x).transpose(1, 2)), dim=1)
        y = self.narrow(functional.silu(self.statistics(self.depthwise(y))))
        x = x + y.transpose(1, 2)
        x = x + self.feeds[1](self.norms[3](x)) / 2
        z: torch.Tensor = self.norms[4](x)
        return z


class Tacotron(nn.Module):
    """In the manner of Tacotron 2: an encoder of letters, a decoder that steps through frames with attention.

    Teacher-forced: the frames before are given. ``letters`` (batch, length), ``frames`` (batch, steps, 80).
    """

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.letters = nn.Embedding(60, width)
        self.convolutions = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU()
                )
                for _ in range(3)
            )
        )
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.before = mlp(80, width, width)
        self.attend, self.decode = nn.LSTMCell(2 * width, width), nn.LSTMCell(2 * width, width)
        self.query, self.memory = nn.Linear(width, 64), nn.Linear(width, 64)
        self.energy, self.mel = nn.Linear(64, 1), nn.Linear(2 * width, 81)

    def forward(self, letters: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.convolutions(self.letters(letters).transpose(1, 2)).transpose(1, 2)
        memory, _ = self.lstm(x)
        keys, given = self.memory(memory), self.before(frames)
        context = h = c = g = d = memory.new_zeros(memory.shape[0], memory.shape[2])
        made = []
        for step in range(self.steps):
            h, c = self.attend(torch.cat([given[:, step], context], -1), (h, c))
            energy = self.energy(torch.tanh(self.query(h).unsqueeze(1) + keys))
            context = (energy.softmax(1) * memory).sum(1)
            g, d = self.decode(torch.cat([h, context], -1), (g, d))
            made.append(self.mel(torch.cat([g, context], -1)))
        return (torch.stack(made, 1),)


class DeepSpeech(nn.Module):
    """Deep Speech 2 (Amodei et al. 2015): convolutions over a spectrogram, then recurrent layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.head = nn.Sequential(
            nn.Conv2d(1, 32, (11, 5), (2, 2), (5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 5), (2, 1), (5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.lstm = nn.LSTM(32 * 20, width, layers, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * width, 29)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.head(features.transpose(1, 2).unsqueeze(1))
        states, _ = self.lstm(x.permute(0, 3, 1, 2).flatten(2))
        return (functional.log_softmax(self.scores(states), dim=-1),)


class WaveNet(nn.Module):
    """Oord et al. 2016: dilated causal convolutions with gates."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.head = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2 ** (k % 8)) for k in range(layers)
        )
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.tail = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1)
        )

    def forward(self, wave: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.head(wave.unsqueeze(1))
        total = torch.zeros_like(x)
        for k, (gate, out) in enumerate(zip(self.gates, self.outs)):
            a, b = gate(functional.pad(x, (2 ** (k % 8), 0))).chunk(2, 1)
            residual, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + residual, total + skip
        return (self.tail(total),)


class Separator(nn.Module):
    """Conv-TasNet (Luo and Mesgarani 2019): masks on a learned transform of the wave, for two speakers."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, width, 16, 8, bias=False)
        self.decode = nn.ConvTranspose1d(width, 1, 16, 8, bias=False)
        self.norm, self.narrow = nn.GroupNorm(1, width), nn.Conv1d(width, width // 2, 1)
        self.blocks = nn.ModuleList(SeparatorBlock(width // 2, 2**k) for k in range(blocks))
        self.mask = nn.Conv1d(width // 2, 2 * width, 1)

    def forward(self, wave: torch.Tensor) -> tuple[torch.Tensor, ...]:
        coded = torch.relu(self.encode(wave.unsqueeze(1)))
        x = self.narrow(self.norm(coded))
        for block in self.blocks:
            x = block(x)
        first, second = torch.sigmoid(self.mask(x)).chunk(2, 1)
        return self.decode(coded * first), self.decode(coded * second)


class SeparatorBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        inner = 2 * width
        self.body = nn.Sequential(
            nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner),
            nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner),
            nn.PReLU(), nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.body(x)
        return y


def _whisper(size: Size) -> Model:
    library = imported("transformers.models.whisper.modeling_whisper")
    torch.manual_seed(0)
    fields = {
        "d_model": WIDTH,
        "encoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": INNER,
        "max_source_positions": Both(200, 1500),
    }
    encoder = library.WhisperEncoder(library.WhisperConfig(**at(size, fields)))
    module = Answers(encoder, ("input_features",), ("last_hidden_state",))
    inputs = noise(80, 2 * at(size, fields["max_source_positions"]))
    return made(
        module, inputs, at(size, Both(((1,), (3,)), ((1,), (16,)))), names=("input_features",)
    )


def _hifigan(size: Size) -> Model:
    channels = at(size, Both(64, 512))
    model = transformer("SpeechT5HifiGan", "", size, {"upsample_initial_channel": channels})
    module = Answers(model, ("spectrogram",))
    shapes = at(size, Both(((1, 20), (2, 14)), ((1, 100), (16, 100))))
    axes = (Axis("batch", 1, 3), Axis("frames", 8, 24, 2))
    return made(module, noise(80), shapes, axes, ("spectrogram",), strong=True)


def _encodec(size: Size) -> Model:
    model = transformer("Encodec", "Model", size, {"num_filters": Both(8, 32)})
    module = Answers(model.encoder)

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (torch.randn(shape[0], 1, shape[1], generator=generator(seed)),)

    return made(module, inputs, at(size, WAVES), WAVE_AXES, ("input_values",))


def _spectrogram_transformer(size: Size) -> Model:
    fields = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_length": Both(128, 512),
    }
    model = transformer("AST", "ForAudioClassification", size, fields)
    inputs = noise(at(size, fields["max_length"]), 128)
    module = Answers(model, ("input_values",), ("logits",))
    return made(
        module, inputs, at(size, Both(((1,), (3,)), ((1,), (32,)))), names=("input_values",)
    )


def _tacotron(size: Size) -> Model:
    torch.manual_seed(0)
    steps = at(size, Both(12, 40))

    def inputs(shape: Shape, seed: int) -> Tensors:
        rng = generator(seed)
        frames = torch.randn(shape[0], steps, 80, generator=rng)
        return torch.randint(0, 60, shape, generator=rng), frames

    module = Tacotron(at(size, Both(128, 512)), steps)
    shapes = at(size, Both(((1, 40), (3, 24)), ((1, 80), (32, 80))))
    axes = (Axis("batch", 1, 4), Axis("letters", 8, 48))
    return made(module, inputs, shapes, axes, ("letters", "frames"), sample=True)


def _framed(name: str, make: Any, *fields: Any, rank: int = 1) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(*(at(size, one) for one in fields))
        return made(module, noise(80), at(size, FRAMES), FRAME_AXES, ("features",), sample=True)

    return Entry(name, "misc", build, rank=rank)


def _waved(name: str, make: Any, shapes: Any, *fields: Any) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(*(at(size, one) for one in fields))
        axes = (Axis("batch", 1, 4), Axis("samples", 800, 3200, 160))
        return made(module, noise(), at(size, shapes), axes, ("wave",))

    return Entry(name, "misc", build)


SHORT = Both(((1, 3200), (2, 2400)), ((1, 16000), (8, 16000)))
HF = ("transformers",)

ENTRIES: tuple[Entry, ...] = (
    _waves("Wav2Vec2", "wav2vec2", WAV2VEC, rank=0),
    _waves("Hubert", "hubert", WAV2VEC),
    _waves("WavLM", "wavlm", WAV2VEC),
    _waves(
        "Wav2Vec2Conformer", "wav2vec2_conformer", {**WAV2VEC, "conv_depthwise_kernel_size": 15}
    ),
    Entry("whisper_encoder", "misc", _whisper, HF, rank=0),
    Entry("hifigan", "misc", _hifigan, HF, rank=0),
    Entry("encodec", "misc", _encodec, HF),
    Entry("audio_spectrogram", "misc", _spectrogram_transformer, HF),
    Entry("tacotron", "misc", _tacotron),
    _framed("conformer", Conformer, WIDTH, LAYERS, HEADS, rank=0),
    _framed("deep_speech", DeepSpeech, Both(128, 512), Both(2, 5)),
    _waved("wavenet", WaveNet, SHORT, Both(32, 64), Both(8, 24)),
    _waved("conv_tasnet", Separator, SHORT, Both(128, 512), Both(6, 8)),
)
