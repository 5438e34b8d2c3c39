"""Writes albert_smiles.jsonl: chemical reactions as token ids for rxnmapper's ALBERT.

AutoTokenizer cannot be used, because the model was trained with another pattern to split SMILES strings. To write the
file again, install rxnmapper and run ``python examples/albert_smiles.py``.
"""

import importlib.util
import json
import re
from pathlib import Path

# Schwaller et al. 2019, Molecular Transformer: one token per atom, bond, ring number or bracket.
PATTERN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "c1ccccc1Br.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "CC(C)S.CN(C)C=O.Fc1cccnc1F>>CC(C)Sc1ncccc1F",
    "O=C(Cl)c1ccccc1.NCC>>CCNC(=O)c1ccccc1",
]


def main() -> None:
    """Writes one line per reaction."""
    spec = importlib.util.find_spec("rxnmapper")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "models/transformers/albert_heads_8_uspto_all_1310k"
    vocabulary = {token: i for i, token in enumerate((folder / "vocab.txt").read_text().splitlines())}
    lines = []
    for reaction in REACTIONS:
        tokens = ["[CLS]", *PATTERN.findall(reaction), "[SEP]"]
        lines.append(json.dumps({"input_ids": [vocabulary[token] for token in tokens]}))
    Path(__file__).with_name("albert_smiles.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
