"""Where the data sets are published: address, size and checksum of every file that a recipe downloads.

Data sets on the Hugging Face Hub are listed by repository and revision; see ``hub.py``.
"""

from .download import Source
from .hub import HubFolder

#: sktime's mirror of the UEA archive; sizes and checksums are of its files (Git LFS pointers of its commit 12d0529).
_UEA = "https://github.com/sktime/sktime-datasets/raw/main/TSC"
UEA = {
    name: Source(f"{_UEA}/{name}.zip", size, sha256, (f"{name}_TRAIN.ts", f"{name}_TEST.ts"))
    for name, size, sha256 in (
        ("EthanolConcentration", 377_813_600, "67c4ff269ad40b474a0917572c0b36256829bdb33df40521c09fcac0c52c6ce4"),
        ("FaceDetection", 600_391_318, "a881a69542f80ceaf718c5ab93ccb107c71003ab852f9d9cdabf9c8faa549e85"),
        ("Handwriting", 2_810_939, "e8a19ce94c82ee76205d441c77928a08ec34f7dcbf3edc11f569055c6ed51a8b"),
        ("Heartbeat", 80_854_057, "2a55749595da3b17c708bfb33a990b4abb4ce10637c9e265183d48d6a43b52f0"),
        ("PEMS-SF", 327_596_807, "8e04f4588bd3a3cac7aa557086386f0b8a559db765036e47809c21747a920309"),
        ("SelfRegulationSCP1", 7_687_240, "5581185eeb098153e3f7524048eec7371c11b52c0ad0f52f7612eeea4267ef83"),
        ("SelfRegulationSCP2", 7_259_176, "16f94e935e4dd5d57a35c1035ab32d4d9074c81b3e78a51ab9680179d33478b9"),
        ("SpokenArabicDigits", 82_065_250, "d7fad522cc54e2dac9309ad5ea79b5120d4272cd9293ed7ff9aabe256009ca4e"),
        ("UWaveGestureLibrary", 2_972_926, "c6a771794bb14a815e204307b7d7e85d7a8291ddb16626cb9460aa5a75b6e042"),
    )
}
#: Sizes in bytes and checksums as TensorFlow Datasets lists them.
_D4RL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"
D4RL = {
    f"{name}-v2": Source(f"{_D4RL}/{name.replace('-', '_')}-v2.hdf5", size, sha256)
    for name, size, sha256 in (
        ("halfcheetah-medium-expert", 474_567_252, "015db75dae5bbe8e94029b71fa0bafc2073365df0c94744e71031189f3f79c06"),
        ("hopper-medium-expert", 304_537_315, "9d51ad87f8c905be3880d84c6140bcdb7fbf39a19e046a237f238ba34fec9e26"),
        ("walker2d-medium-expert", 462_197_079, "6b8d7f868c45bbaedf460be797fb7271b46dee6ebe45fe7a64319f2005b59a04"),
        ("halfcheetah-medium", 237_727_262, "41324e8487a9556d8cfa4538827f8937f4d63dae3030825ebc9f3a726ed08ca0"),
        ("hopper-medium", 152_756_557, "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0"),
        ("walker2d-medium", 232_254_996, "cf00f43add04c17fdfc2958dd581dea0851b2e5bedbe6fda073758a8f841aeda"),
        ("halfcheetah-medium-replay", 59_448_533, "48d494a4770c11f48260736dec090b78bdca8375647ed4d24bfa5b6610c7f683"),
        ("hopper-medium-replay", 75_854_457, "e121c5f7c9857a307baa9edc6a2c3b48e85fedb9ac316ecddd0f48ca7ef4e39b"),
        ("walker2d-medium-replay", 86_323_963, "e75de96a4f77acf7d4e0d6fdf0d7ccb177c26c44bb4388e4fd99f543ccfa18db"),
    )
}

SOURCES = {
    # Size: http://mattmahoney.net/dc/textdata.html; checksum: Hugging Face's datasets/enwik8/dataset_infos.json.
    "enwik8": Source(
        "http://mattmahoney.net/dc/enwik8.zip",
        36_445_475,
        "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ("enwik8",),
    ),
    # The binary version, which has no pickles. Size and checksum: TensorFlow Datasets' url_checksums/cifar10.txt.
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    ),
    # The site of the first author. Size and checksum: Hugging Face's datasets/wikitext/dataset_infos.json.
    "wikitext103": Source(
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
        190_229_076,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    ),
    # The md5 that torchtext's loader of IMDb has; the publisher gives no checksum.
    "imdb": Source(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", md5="7c2ac02c03563afcf9b574c7e56c153a"
    ),
    # 8.2 GB, a gzipped tar despite its name. No checksum is published; gzip's own is checked.
    "long_range_arena": Source("https://storage.googleapis.com/long-range-arena/lra_release.gz"),
    # Sizes and checksums of PG-19's books: the list made when the data set was added to Hugging Face's library (its
    # pull request 306, 2020).
    "pg19_checksums": Source(
        "https://raw.githubusercontent.com/huggingface/datasets/6ce73f6263f9fc3df0db84ae7f937d27a5c208f7/datasets/pg19"
        "/dataset_infos.json",
        4_190_146,
        "e1aee83469a852323b2a93a16772e4f17b33a7c5a675daf70488d59f42c076f7",
    ),
    **UEA,
    **D4RL,
}

HUB = {
    "wiki40b": HubFolder("google/wiki40b", "06bfe584d8193cf58f79c6354ecc2a2b94a7deea", "en"),
    "pg19": HubFolder("emozilla/pg19", "b7bca68072ef1d86348f080bbda0996648d94315", "data"),
    "c4": HubFolder("allenai/c4", "1ddc917116b730e1859edef32896ec5c16be51d0", "en"),
    # The text of wikitext-103-v1.zip as tables.
    "wikitext103": HubFolder("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3", "wikitext-103-v1"),
}
