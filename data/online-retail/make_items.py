"""Writes items.csv.gz and users.csv.gz beside online_retail.csv.gz. Run once; the results are committed.

The log is all the source has, so the catalogue is taken from it: per stock code the most frequent description, the median
unit price of its sales, and a category: the most common head noun of the catalogue that the description contains.
    python data/online-retail/make_items.py
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
MIN_ITEMS = 15  # a word that fewer descriptions end in is no category
NOT_CATEGORIES = set(
    # words that end descriptions without saying what the thing is: colours, motifs, sizes, materials, amounts, seasons
    "RED BLUE PINK WHITE BLACK GREEN IVORY CREAM GOLD SILVER GREY PURPLE BROWN YELLOW ORANGE TURQUOISE NATURAL CLEAR AMBER "
    "DESIGN DESIGNS DESIGN. RETROSPOT SPOT POLKADOT SMALL LARGE MEDIUM MINI BIG ASSORTED COLOURS COLOUR PIECE PIECES PCS PC "
    "WOOD METAL GLASS PAPER CERAMIC VINTAGE RETRO CLASSIC FLOWER FLOWERS ROSE ROSES STAR STARS HEARTS BIRD BIRDS BUTTERFLY "
    "PAISLEY STRIPE STRIPES SKULL SKULLS CAT DOG OWL RABBIT PARK SPACEBOY DOLLY CIRCUS SIZE TONE FINISH COLLECTION STYLE SHAPE".split()
)
SAME = {"BAGS": "BAG", "CARDS": "CARD", "BOXES": "BOX", "LIGHTS": "LIGHT", "CANDLES": "CANDLE", "CASES": "CASE", "TINS": "TIN"}
SAME |= {"EARRING": "EARRINGS", "T-LIGHTS": "T-LIGHT", "HOOKS": "HOOK", "STICKERS": "STICKER", "BOWLS": "BOWL", "MUGS": "MUG"}
SAME |= {"DECORATIONS": "DECORATION", "NAPKINS": "NAPKIN", "PLATES": "PLATE", "CUPS": "CUP", "JARS": "JAR", "FRAMES": "FRAME"}


def words_of(description: str) -> list[str]:
    return [SAME.get(word, word) for word in re.findall(r"[A-Z][A-Z\-]+", description.upper())]


def categories(descriptions: pd.Series) -> pd.Series:
    """A category word per description: its last word that many descriptions end in, else any common one it holds, else OTHER."""
    words = descriptions.map(words_of)
    heads = Counter(w[-1] for w in words if w)
    common = {word: n for word, n in heads.items() if n >= MIN_ITEMS and word not in NOT_CATEGORIES}
    return words.map(lambda ws: next((w for w in reversed(ws) if w in common), "OTHER"))


def main() -> None:
    log = pd.read_csv(HERE / "online_retail.csv.gz", dtype={"StockCode": str, "InvoiceNo": str, "CustomerID": str})
    sales = log[(log["Quantity"] > 0) & (log["UnitPrice"] > 0)]
    described = sales.dropna(subset=["Description"])
    described = described.assign(Description=described["Description"].str.split().str.join(" "))
    items = described.groupby("StockCode")["Description"].agg(lambda texts: texts.value_counts().sort_index().idxmax())
    items = items.rename("description").to_frame()
    items["price"] = sales.groupby("StockCode")["UnitPrice"].median().round(3)
    items["category"] = categories(items["description"])
    gzip = {"method": "gzip", "mtime": 0}  # the same bytes at every run
    items.reset_index().to_csv(HERE / "items.csv.gz", index=False, compression=gzip)
    # A customer's country is the one of the first invoice: nothing that happens later can change it.
    users = log.dropna(subset=["CustomerID"]).groupby("CustomerID")["Country"].first().rename("country")
    users.reset_index().to_csv(HERE / "users.csv.gz", index=False, compression=gzip)
    print(items["category"].value_counts().to_string())


if __name__ == "__main__":
    main()
