"""k-means: kernels against their numpy twins, what is optimal, groups, and what depends on what."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import KMeansRows, ParameterType, RowsError, Scheme, Segment, pack
from cnr_codecs.elements import round_to_bfloat16
from cnr_codecs.kernels import kmeans as kernels
from cnr_codecs.kmeans.kmeans import GroupName, by_clusters, thresholds
from cnr_codecs.protocol import Rows
from tests.test_codecs.hard_rows import FLOAT_MAX, RowMaker, adversarial_rows, decode, encode, rows_of
from tests.test_codecs.references import kmeans as kmeans_reference
from tests.test_codecs.references import uniform as reference

ROW_MAKERS: dict[str, RowMaker] = {
    "normal": lambda rng, dim: rng.normal(0, 0.1, dim),
    "few values": lambda rng, dim: rng.choice([0.25, -1.5, 3, 0.1], dim),
    "constant": lambda rng, dim: np.full(dim, rng.choice([0.1, -3e38, 1e-42, 0.0, -0.0])),
    "zeros of both signs": lambda rng, dim: rng.choice([0.0, -0.0], dim),
    "subnormal": lambda rng, dim: rng.normal(0, 1e-41, dim),
    "tiny range, huge offset": lambda rng, dim: 1e8 + rng.uniform(0, 100, dim),
    "largest": lambda rng, dim: rng.choice([FLOAT_MAX, -FLOAT_MAX, 0], dim),
    "one outlier": lambda rng, dim: np.where(np.arange(dim) == dim // 2, -1e30, rng.normal(0, 1e-3, dim)),
    "two heaps": lambda rng, dim: rng.choice([-5, 5], dim) + rng.normal(0, 1e-2, dim),
    "heavy tails": lambda rng, dim: rng.standard_cauchy(dim),
    "any scale": lambda rng, dim: rng.normal(size=dim) * 10.0 ** rng.integers(-30, 30, dim),
}
NOT_FINITE: dict[str, RowMaker] = {
    "with nan": lambda rng, dim: rng.choice([1.0, np.nan], dim),
    "with inf": lambda rng, dim: rng.choice([1.0, np.inf, -np.inf], dim),
}
GROUPS = st.sampled_from(["row", "block", "cluster"])


def codebooks_of(segment: Segment) -> Rows:
    """The codebook of each row of a segment, float32 (count, 2**bits)."""
    wide = segment.parameters.astype(np.float32)
    return wide if segment.books is None else wide[segment.books]


def mean_error(values: Rows, decoded: Rows) -> float:
    return float(np.linalg.norm(values.astype(np.float64) - decoded, axis=1).mean())


def kernel_cuts(ordered: Rows, clusters: int, exact: bool, width: int | None = None) -> npt.NDArray[np.int64]:
    """What the kernels find in sets that lie in rows wider than they are."""
    wide = np.full((len(ordered), width or ordered.shape[1]), np.inf, np.float32)
    wide[:, : ordered.shape[1]] = ordered
    sizes = np.full(len(ordered), ordered.shape[1])
    cuts = np.empty((len(ordered), clusters + 1), np.int64)
    if exact:
        kernels.exact_cuts(wide, sizes, cuts)
    else:
        kernels.lloyd_cuts(wide, sizes, 30, cuts)
    return cuts


@pytest.mark.slow
@given(values=adversarial_rows(ROW_MAKERS, most_rows=40), bits=st.integers(1, 5), margin=st.integers(0, 5))
@settings(deadline=None, max_examples=200)
def test_clusters_equal_the_reference(values: Rows, bits: int, margin: int) -> None:
    ordered = np.sort(values + np.float32(0), axis=1)
    cuts = kernel_cuts(ordered, 1 << bits, False, ordered.shape[1] + margin)
    np.testing.assert_array_equal(cuts, kmeans_reference.lloyd_cuts(ordered, 1 << bits, 30))
    best = kernel_cuts(ordered, 1 << bits, True, ordered.shape[1] + margin)
    np.testing.assert_array_equal(best, kmeans_reference.exact_cuts(ordered, 1 << bits))
    for each in cuts, best:
        assert (np.diff(each, axis=1) >= 0).all()
        assert (each[:, 0] == 0).all()
        assert (each[:, -1] == ordered.shape[1]).all()
        found = np.empty((len(values), 1 << bits)), np.empty(len(values)), np.empty(len(values))
        kernels.cluster_means(ordered, np.full(len(values), ordered.shape[1]), each, *found)
        for ours, expected in zip(found, kmeans_reference.cluster_means(ordered, each), strict=True):
            np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
@given(values=adversarial_rows(ROW_MAKERS | NOT_FINITE, most_rows=40), bits=st.integers(1, 8), group=GROUPS)
@settings(deadline=None, max_examples=200)
def test_codes_name_the_nearest_stored_centroid(values: Rows, bits: int, group: GroupName) -> None:
    payload = encode(KMeansRows(bits, group), values)
    decoded = decode(payload)
    np.testing.assert_array_equal(cnr_codecs.present_rows(payload), np.arange(len(values)))
    for segment in payload.segments:
        rows = rows_of(segment)
        if segment.scheme is Scheme.RAW:
            np.testing.assert_array_equal(decoded[rows].view(np.uint32), values[rows].view(np.uint32))
            continue
        assert segment.scheme is (Scheme.CODEBOOK if group == "row" else Scheme.SHARED)
        assert np.isfinite(values[rows]).all()
        codebooks = codebooks_of(segment)
        codes = kmeans_reference.nearest(values[rows], codebooks)
        np.testing.assert_array_equal(segment.codes, pack(codes, bits))
        expected = np.take_along_axis(codebooks, codes.astype(np.intp), 1)
        np.testing.assert_array_equal(decoded[rows].view(np.uint32), expected.view(np.uint32))


@given(values=adversarial_rows(ROW_MAKERS, most_rows=40), bits=st.integers(1, 4))
@settings(deadline=None)
def test_thresholds_split_values_where_distances_do(values: Rows, bits: int) -> None:
    centroids = np.sort(np.resize(values, (len(values), 1 << bits)), axis=1)
    limits = thresholds(centroids)
    for probe in limits, np.nextafter(np.minimum(limits, np.float32(1e38)), np.float32(np.inf)):
        codes = (probe[:, None, :] > limits[:, :, None]).sum(axis=1)
        np.testing.assert_array_equal(codes, kmeans_reference.nearest(probe, centroids))


def brute_force_error(ordered: Rows, clusters: int) -> float:
    """The least squared error of one set, by trying every cluster for every end."""
    z = ordered.astype(np.float64)
    best = {0: 0.0}
    for _ in range(clusters):
        best = {
            end: min(best[i] + ((z[i:end] - z[i:end].mean()) ** 2).sum() for i in best if i < end)
            for end in range(1, len(z) + 1)
            if any(i < end for i in best)
        } | {0: 0.0}
    return best[len(z)]


@given(
    values=st.lists(st.integers(-50, 50), min_size=1, max_size=12),
    bits=st.integers(1, 3),
)
@settings(deadline=None)
def test_exact_is_the_optimum_and_the_default_is_no_better(values: list[int], bits: int) -> None:
    ordered = np.sort(np.array([values], np.float32), axis=1)
    least = brute_force_error(ordered[0], 1 << bits)

    def error(cuts: Rows) -> float:
        return float(kmeans_reference.cluster_means(ordered, cuts)[1][0])

    assert error(kernel_cuts(ordered, 1 << bits, True)) == pytest.approx(least, abs=1e-9)
    assert error(kernel_cuts(ordered, 1 << bits, False)) >= least - 1e-9


@pytest.mark.parametrize(("bits", "dim"), [(2, 16), (2, 64), (4, 64), (3, 128), (4, 300)])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "two heaps"])
def test_the_default_comes_near_the_optimum(bits: int, dim: int, kind: str) -> None:
    rng = np.random.default_rng(0)
    values = np.stack([ROW_MAKERS[kind](rng, dim) for _ in range(300)]).astype(np.float32)
    fast = mean_error(values, decode(encode(KMeansRows(bits), values)))
    best = mean_error(values, decode(encode(KMeansRows(bits, exact=True), values)))
    assert best <= fast <= 1.1 * best


def test_rows_of_few_values_are_exact() -> None:
    rng = np.random.default_rng(1)
    values = rng.choice([0.1, -7e4, 1e-3, 2.0, 1e30, -0.25, 6.0, 9.5], (200, 48)).astype(np.float32)
    for codec in KMeansRows(4), KMeansRows(3, exact=True), KMeansRows(4, exact=True):
        np.testing.assert_array_equal(decode(encode(codec, values)), values)
    np.testing.assert_array_equal(decode(encode(KMeansRows(3), values[:, :24])), values[:, :24])


@pytest.mark.slow
@given(values=adversarial_rows(ROW_MAKERS | NOT_FINITE, most_rows=40), bits=st.integers(1, 6), data=st.data())
@settings(deadline=None)
def test_with_a_codebook_each_a_row_decodes_alike_whatever_it_is_encoded_with(
    values: Rows, bits: int, data: st.DataObject
) -> None:
    codec = KMeansRows(bits)
    together = decode(encode(codec, values))
    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, unique=True))
    apart = decode(encode(codec, np.ascontiguousarray(values[chosen])))
    np.testing.assert_array_equal(apart.view(np.uint32), together[chosen].view(np.uint32))


def test_blocks_are_of_rows_after_one_another() -> None:
    rng = np.random.default_rng(2)
    values = (rng.normal(size=(100, 32)) + 5 * (np.arange(100) // 30)[:, None]).astype(np.float32)
    values[[3, 40]] = np.nan
    (segment, *_) = encode(KMeansRows(4, "block", block_rows=30), values).segments
    assert segment.parameters.shape == (4, 16)
    np.testing.assert_array_equal(segment.books, rows_of(segment) // 30)
    # Each block's codebook is that of its rows alone.
    alone = encode(KMeansRows(4, "block", block_rows=30), values[60:90]).segments[0]
    np.testing.assert_array_equal(segment.parameters[2], alone.parameters[0])


def test_clusters_hold_rows_that_are_alike() -> None:
    rng = np.random.default_rng(3)
    scale = rng.choice([1e-3, 1, 1e3], 300)[:, None]
    values = (rng.normal(size=(300, 40)) * scale).astype(np.float32)
    apart = mean_error(values / scale, decode(encode(KMeansRows(4, "cluster"), values)) / scale)
    blocks = mean_error(values / scale, decode(encode(KMeansRows(4, "block"), values)) / scale)
    assert apart < blocks / 3
    (segment,) = encode(KMeansRows(4, "cluster", clusters=4), values).segments
    assert segment.parameters.shape == (4, 16)
    assert segment.books is not None
    assert np.bincount(segment.books).tolist() == [75] * 4


@given(st.integers(1, 300), st.integers(0, 8), st.integers(1, 5))
@settings(deadline=None)
def test_clusters_are_equal_in_size_and_apart(count: int, levels: int, distinct: int) -> None:
    clusters = min(1 << levels, 1 << (count.bit_length() - 1))
    features = np.random.default_rng(count).integers(0, distinct, (count, 2)).astype(np.float32)
    sizes = np.bincount(by_clusters(features, clusters), minlength=clusters)
    assert len(sizes) == clusters
    assert sizes.max() - sizes.min() <= 1


def test_float16_centroids_serve_plain_embeddings_and_float32_those_they_would_hurt() -> None:
    rng = np.random.default_rng(5)
    plain = rng.normal(0, 0.1, (64, 64))
    values = np.concatenate([plain, 1000 + plain, plain * 1e6]).astype(np.float32)
    for group in "row", "block":
        kinds = {
            segment.parameter_type: set(rows_of(segment).tolist())
            for segment in encode(KMeansRows(3, group), values).segments
        }
        assert kinds == {
            ParameterType.FLOAT16: set(range(64)),
            ParameterType.FLOAT32: set(range(64, 192)),
        }


def test_rows_that_codebooks_would_not_make_smaller_stay_exact() -> None:
    rng = np.random.default_rng(6)
    for codec, shape in (
        (KMeansRows(4), (30, 9)),
        (KMeansRows(8), (30, 170)),
        (KMeansRows(8, "block"), (1, 100)),
        (KMeansRows(8, "cluster"), (2, 80)),
    ):
        values = rng.normal(size=shape).astype(np.float32)
        payload = encode(codec, values)
        assert [segment.scheme for segment in payload.segments] == [Scheme.RAW]
        np.testing.assert_array_equal(decode(payload), values)


@pytest.mark.parametrize("group", ["row", "block", "cluster"])
def test_rows_that_are_not_finite_stay_exact_even_if_all_are(group: GroupName) -> None:
    values = np.full((20, 64), np.inf, np.float32)
    for finite in 0, 3:
        values[:finite] = np.arange(64) % 7
        np.testing.assert_array_equal(decode(encode(KMeansRows(3, group), values)), values)


def test_zeros_decode_to_positive_zero() -> None:
    values = np.array([[0.0, -0.0] * 30, [-0.0] * 60], np.float32)
    for bits in range(1, 5):
        decoded = decode(encode(KMeansRows(bits), values))
        assert not decoded.any()
        assert not np.signbit(decoded).any()


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", ["row", "block", "cluster"])
def test_sixteen_bit_floats_are_rounded_when_decoded(element: str, group: GroupName) -> None:
    rng = np.random.default_rng(7)
    wide = np.concatenate([rng.normal(size=(200, 90)) * 10.0 ** rng.integers(-6, 4, (200, 1))])
    wide[:9] = rng.choice([65504.0, -60000], (9, 90))
    if element == "float16":
        values = wide.astype(np.float16)
    else:
        values = (wide.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    payload = encode(KMeansRows(4, group), values, element)
    decoded = decode(payload)
    assert np.isfinite(decoded).all()
    for segment in payload.segments:
        assert segment.scheme is not Scheme.RAW
        rows = rows_of(segment)
        codebooks = codebooks_of(segment)
        codes = reference.unpack(segment.codes, 4, 90).astype(np.intp)
        exact = np.take_along_axis(codebooks, codes, 1)
        rounded = exact.astype(np.float16) if element == "float16" else round_to_bfloat16(exact)
        np.testing.assert_array_equal(decoded[rows], rounded)


def test_windows_of_chunks_are_decoded_in_place() -> None:
    rng = np.random.default_rng(8)
    values = rng.normal(size=(300, 40)).astype(np.float32)
    offsets = np.sort(rng.choice(1000, 300, replace=False))
    for group in "row", "block", "cluster":
        codec = KMeansRows(3, group)
        payload = cnr_codecs.parse(codec.encode_rows(values, offsets, 1000, element="float32"))
        whole = np.full((1000, 40), -1, np.float32)
        assert cnr_codecs.decode_into(payload, whole, np.ones(1000, np.uint8)) == 300
        assert (np.abs(whole[offsets] - values) < 2).all()
        wide = np.full((500, 60), 9, np.float32)
        need = rng.integers(0, 2, 500).astype(np.uint8)
        asked = need.copy()
        written = cnr_codecs.decode_into(payload, wide[:, 5:45], need, 300)
        held = np.isin(np.arange(300, 800), offsets) & (asked != 0)
        assert written == held.sum()
        np.testing.assert_array_equal(need, asked & ~held)
        np.testing.assert_array_equal(wide[held, 5:45], whole[300:800][held])
        assert (wide[~held] == 9).all()


def test_expected_size_is_the_size_of_plain_rows() -> None:
    values = np.random.default_rng(8).normal(0, 0.1, (1024, 65)).astype(np.float32)
    size = len(KMeansRows(3).encode_rows(values, None, 1024, element="float32"))
    assert size == 24 + 4 + 16 + 4 + 1024 * KMeansRows(3).bytes_per_row(65, "float32")
    for codec in KMeansRows(3, "block"), KMeansRows(3, "block", block_rows=32), KMeansRows(3, "cluster"):
        size = len(codec.encode_rows(values, None, 1024, element="float32"))
        assert size == 24 + 4 + 16 + 4 + 4 + 1024 * codec.bytes_per_row(65, "float32")
    assert KMeansRows(8).bytes_per_row(16, "float32") == 64


def test_exact_codebooks_of_too_many_values_are_refused() -> None:
    values = np.zeros((300, 256), np.float32)
    with pytest.raises(RowsError, match="76800 values share"):
        encode(KMeansRows(2, "block", block_rows=300, exact=True), values)
    encode(KMeansRows(2, "block", block_rows=256, exact=True), values)
