"""The example's data: the built-in set, folders and their check, augmentation and order."""

import example_path
import numpy as np
import pytest
import torch
from PIL import Image

one_thread = example_path.one_thread

data, synthetic = map(example_path.load, ("data", "synthetic"))


def write_pair(root, image, mask, size=(40, 30), mask_size=None):
    rng = np.random.default_rng(0)
    for path, mode, pixels in ((image, "RGB", size), (mask, "L", mask_size or size)):
        path = root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (pixels[1], pixels[0], 3) if mode == "RGB" else (pixels[1], pixels[0])
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)


def write_cod10k(root, train=4, test=5):
    for split, count in (("Train", train), ("Test", test)):
        for index in range(count):
            write_pair(root, f"{split}/Image/p{index}.jpg", f"{split}/GT_Object/p{index}.png")
    return root


@pytest.fixture(scope="module")
def builtin():
    return {split: synthetic.compose_set(split, 48) for split in ("train", "val")}


def test_builtin_set_is_large_enough(builtin):
    assert len(builtin["train"][0]) >= 60
    assert len(builtin["val"][0]) >= 20
    used = set(builtin["train"][2]) | set(builtin["val"][2])
    assert len(used) >= 8


def test_no_photograph_is_on_both_sides(builtin):
    assert not set(builtin["train"][2]) & set(builtin["val"][2])
    hashes = [synthetic.photograph_path(name).read_bytes() for name in synthetic.TRAIN_PHOTOGRAPHS]
    assert not any(synthetic.photograph_path(name).read_bytes() in hashes for name in synthetic.HELD_OUT_PHOTOGRAPHS)


def test_builtin_images_and_masks(builtin):
    for images, masks, _ in builtin.values():
        for image, mask in zip(images, masks, strict=True):
            assert image.shape == (48, 48, 3) and image.dtype == np.uint8
            assert mask.shape == (48, 48) and set(np.unique(mask)) == {0, 255}
            assert 0.03 < (mask > 0).mean() < 0.5
            assert image.std() > 2


def test_builtin_set_is_deterministic_and_follows_its_seed(builtin):
    again = synthetic.compose_set("val", 48)
    other = synthetic.compose_set("val", 48, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(builtin["val"][0], again[0], strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(builtin["val"][1], again[1], strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(builtin["val"][0], other[0], strict=True))


def test_builtin_objects_are_camouflaged(builtin):
    contrasts = []
    for images, masks, _ in builtin.values():
        for image, mask in zip(images, masks, strict=True):
            ring = synthetic_ring(mask)
            contrasts.append(abs(image[mask > 0].mean() - image[ring].mean()))
    assert np.median(contrasts) < 40


def synthetic_ring(mask):
    """The background pixels within six pixels of the object."""
    inside = torch.from_numpy(mask > 0).float()[None, None]
    wide = torch.nn.functional.max_pool2d(inside, 13, stride=1, padding=6)[0, 0].numpy() > 0
    return wide & (mask == 0)


@pytest.mark.parametrize(("arguments", "message"), [(("test", 48), "got 'test'"), (("train", 16), "got 16")])
def test_builtin_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic.compose_set(*arguments)


def test_cod10k_folder_is_read(tmp_path):
    root = write_cod10k(tmp_path)
    data.check_folder(root)
    train, val = data.open_split(root, "train", 32), data.open_split(root, "val", 32)
    assert (len(train), len(val)) == (4, 1)
    image, mask = val[(0, 0)]
    assert image.shape == (3, 32, 32) and image.dtype == torch.float32
    assert mask.shape == (1, 32, 32) and set(mask.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("layout", data.SPLIT_LAYOUTS)
def test_split_layouts_are_recognised(tmp_path, layout):
    for split in (0, 2):
        write_pair(tmp_path, f"{layout[split]}/a.jpg", f"{layout[split + 1]}/a.png")
    data.check_folder(tmp_path)
    assert data.list_pairs(tmp_path, "train") == [(tmp_path / layout[0] / "a.jpg", tmp_path / layout[1] / "a.png")]
    assert data.list_pairs(tmp_path, "val") == [(tmp_path / layout[2] / "a.jpg", tmp_path / layout[3] / "a.png")]


@pytest.mark.parametrize("layout", data.FLAT_LAYOUTS)
def test_flat_layouts_hold_out_a_fifth(tmp_path, layout):
    for index in range(10):
        write_pair(tmp_path, f"{layout[0]}/{index}.jpg", f"{layout[1]}/{index}.png")
    train, val = data.list_pairs(tmp_path, "train"), data.list_pairs(tmp_path, "val")
    assert (len(train), len(val)) == (8, 2)
    assert not set(train) & set(val)


def test_missing_mask_is_named(tmp_path):
    root = write_cod10k(tmp_path)
    (root / "Train/GT_Object/p2.png").unlink()
    with pytest.raises(data.DatasetError, match=f"missing mask for {root}/Train/Image/p2.jpg"):
        data.check_folder(root)


@pytest.mark.parametrize("path", ["Train/Image/p1.jpg", "Train/GT_Object/p1.png", "Test/Image/p0.jpg"])
@pytest.mark.parametrize("kept", [0, 0.5])
def test_unreadable_image_is_named(tmp_path, path, kept):
    root = write_cod10k(tmp_path)
    whole = (root / path).read_bytes()
    (root / path).write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(data.DatasetError, match=f"unreadable image {root / path}"):
        data.check_folder(root)


def test_text_in_place_of_a_image_is_named(tmp_path):
    root = write_cod10k(tmp_path)
    (root / "Train/Image/p3.jpg").write_text("no image")
    with pytest.raises(data.DatasetError, match=f"unreadable image {root}/Train/Image/p3.jpg"):
        data.check_folder(root)


def test_mask_of_another_size_is_named(tmp_path):
    root = write_cod10k(tmp_path)
    write_pair(root, "Train/Image/p0.jpg", "Train/GT_Object/p0.png", mask_size=(30, 40))
    message = f"mask {root}/Train/GT_Object/p0.png is 30x40, its image {root}/Train/Image/p0.jpg is 40x30"
    with pytest.raises(data.DatasetError, match=message):
        data.check_folder(root)


def test_all_problems_are_listed_up_to_a_limit(tmp_path):
    root = write_cod10k(tmp_path, train=25)
    for index in range(25):
        (root / f"Train/GT_Object/p{index}.png").unlink()
    with pytest.raises(data.DatasetError, match=r"25 problem\(s\)") as caught:
        data.check_folder(root)
    assert str(caught.value).count("missing mask") == data.SHOWN_PROBLEMS
    assert "and 5 more" in str(caught.value)


def test_folders_without_data_are_named(tmp_path):
    with pytest.raises(data.DatasetError, match=f"{tmp_path}/none is not a folder"):
        data.find_folders(tmp_path / "none")
    with pytest.raises(data.DatasetError, match=f"{tmp_path} has none of the known layouts"):
        data.find_folders(tmp_path)
    write_pair(tmp_path, "Train/Image/a.jpg", "Test/Image/a.jpg")
    with pytest.raises(data.DatasetError, match=f"not {tmp_path}/Train/GT_Object"):
        data.find_folders(tmp_path)


def test_empty_folders_are_refused(tmp_path):
    for part in data.SPLIT_LAYOUTS[0]:
        (tmp_path / part).mkdir(parents=True)
    with pytest.raises(data.DatasetError, match="no train images"):
        data.check_folder(tmp_path)


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    dataset = data.BuiltinSet("train", 48, seed=3, augmented=True, count=6)
    same = data.BuiltinSet("train", 48, seed=3, augmented=True, count=6)
    first = [dataset[(1, index)] for index in range(6)]
    second = [same[(1, index)] for index in reversed(range(6))][::-1]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a[0], dataset[(2, index)][0]) for index, a in enumerate(first))


def test_augmentation_moves_image_and_mask_together():
    mask = np.zeros((20, 20), np.uint8)
    mask[2:7, 3:11] = 255
    image = np.repeat(mask[..., None], 3, 2)
    for seed in range(40):
        turned, outline = data.augment(image, mask, np.random.default_rng(seed))
        assert np.array_equal(turned[..., 0] > 127, outline > 127)


def test_sampler_shares_a_permutation_among_ranks():
    ranks = [data.EpochSampler(10, seed=1, rank=rank, world=3) for rank in range(3)]
    taken = [list(sampler) for sampler in ranks]
    assert [len(part) for part in taken] == [4, 4, 4] == [len(sampler) for sampler in ranks]
    assert {index for part in taken for _, index in part} == set(range(10))
    ranks[0].epoch = 1
    assert [epoch for epoch, _ in ranks[0]] == [1] * 4
    assert list(ranks[0]) != taken[0]
    assert [index for _, index in data.EpochSampler(5, shuffle=False)] == [0, 1, 2, 3, 4]


def test_metrics_of_known_masks():
    mask = np.zeros((24, 24))
    mask[:, :12] = 1
    half = np.zeros((24, 24))
    half[:12, :12] = 1
    # Not above: it imports scikit-learn, which would cost every process of the tests a second.
    metrics = example_path.load("metrics")
    perfect, partial = metrics.SegmentationMetrics(), metrics.SegmentationMetrics()
    perfect.add(mask, mask)
    partial.add(half, mask)
    best, worse = perfect.results(), partial.results()
    assert best["iou"] == 1 and best["mae"] == 0
    assert worse["iou"] == 0.5 and worse["mae"] == pytest.approx(0.25)
    for name in ("s_measure", "e_measure", "weighted_f"):
        assert best[name] == pytest.approx(1, abs=5e-3) and worse[name] < best[name]
    assert metrics.constant_mask_iou([mask, half]) == pytest.approx((0.5 + 0.25) / 2)
    assert metrics.iou(np.zeros(4, bool), np.zeros(4, bool)) == 1
