"""Write items.csv.gz and users.csv.gz beside online_retail.csv.gz. Run once; the results are committed.

    python data/online-retail/make_items.py

The source has no catalogue, so it is made from the log: per stock code the most frequent description, the median unit price of
its sales, and a category. English puts the head noun last, so the last word of the description that CATEGORY_WORDS contains
decides the category ("LUNCH BAG RED RETROSPOT" is a bag, "RED RETROSPOT CAKE STAND" is furniture).
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent

# Frequent nouns of the descriptions, by category.
CATEGORY_WORDS = {
    "BAGS": """
        BAG BAGS HANDBAG WASHBAG PURSE SHOPPER RUCKSACK BACKPACK LUGGAGE PASSPORT TOTE
    """,
    "BOXES AND TINS": """
        BOX BOXES TIN TINS CASE JAR JARS CHEST CRATE CONTAINER CONTAINERS TRINKET
    """,
    "BATH AND BEAUTY": """
        BATH SOAP SPONGE TOWEL TOWELS FLANNEL TISSUES TISSUE COSMETIC MAKEUP PLASTERS PERFUME TOOTHBRUSH SHAVING
    """,
    "CANDLES AND LIGHTS": """
        CANDLE CANDLES T-LIGHT T-LIGHTS LIGHT LIGHTS LAMP LAMPS LANTERN LANTERNS LAMPSHADE CHANDELIER INCENSE
        CANDLEHOLDER CANDLESTICK CANDLEPOT VOTIVE TEALIGHT BULB BULBS NIGHTLIGHT LIGHTBULB TEA-LIGHT BURNER MATCHES
    """,
    "CARDS AND WRAP": """
        CARD CARDS WRAP WRAPPING RIBBON RIBBONS TAPE TAG TAGS GIFTWRAP ENVELOPE ENVELOPES GIFTBOX
    """,
    "CHILDREN": """
        TOY TOYS DOLL DOLLS JIGSAW PUZZLE GAME GAMES SKITTLES BLOCKS SPINNING TOP CHILDS CHILDRENS CHILDREN KIDS GIRL
        BOY BABY TEDDY BEAR PLAYHOUSE BALL BALLOON BALLOONS HELICOPTER ROBOT DOMINOES SOLDIER SNAKES LUDO WINDMILL
        PUPPET MARBLES
    """,
    "CHRISTMAS": """
        CHRISTMAS XMAS ADVENT SANTA REINDEER SNOWMAN SNOWFLAKE SNOWFLAKES STOCKING BAUBLE BAUBLES NATIVITY SNOW SLEIGH
    """,
    "CLOCKS": """
        CLOCK CLOCKS ALARM
    """,
    "DECORATIONS": """
        DECORATION DECORATIONS GARLAND GARLANDS BUNTING HEART HEARTS WREATH FLAG FLAGS ORNAMENT ANGEL TREE CHAIN
        CHAINS MOBILE STRING ICICLE ICICLES FEATHERS BABUSHKA CHARM EASTER BUNNY HEN EGG EGGS RABBIT CHICK CHICKS
        GNOME
    """,
    "FRAMES AND SIGNS": """
        FRAME FRAMES SIGN SIGNS MIRROR MIRRORS PICTURE PLAQUE PHOTO ALBUM BLACKBOARD CHALKBOARD MEMOBOARD BOARD POSTER
        ART LETTER LETTERS WORD TILE NUMBER WALL STICKER STICKERS MAGNET MAGNETS NOTICEBOARD
    """,
    "FURNITURE": """
        CABINET TABLE CHAIR STOOL SHELF SHELVES DRAWER DRAWERS BENCH SIDEBOARD RACK HOOK HOOKS HANGER HANGERS KNOB
        KNOBS DOORSTOP DOORMAT STEP LADDER DOOR UMBRELLA BIN STAND HOLDER CURTAIN MAT POUFFE SCREEN DRESSER
    """,
    "GARDEN": """
        GARDEN PLANTER PLANT SEEDS BIRDHOUSE BIRDCAGE FEEDER WATERING HERB PARASOL HAMMOCK TROWEL GLOVES PICNIC FLOWER
        FLOWERS TULIP LILY HYDRANGEA VASE BUCKET GREENHOUSE GROW THERMOMETER CAGE
    """,
    "JEWELLERY": """
        NECKLACE NECKLAC NECKLACES EARRING EARRINGS BRACELET BRACELETS RING RINGS BANGLE PENDANT BROOCH JEWELLERY
        JEWEL KEYRING KEYRINGS KEY-RING HAIR HAIRSLIDE COMB GLASSES SCARF TIARA LARIAT HAIRBAND HAIRCLIP DIAMANTE
        PEARL CHOKER BEADS
    """,
    "KITCHEN": """
        KITCHEN CAKE CAKES CAKESTAND BAKING APRON SPOON SPOONS CUTLERY JELLY RECIPE SCALES JUG CAN PAN POT BREAD
        BUTTER SPICE COSY BOTTLE BOTTLES OPENER FUNNEL WHISK GRATER COLANDER PANTRY LOLLY TIMER MEASURING TEASPOONS
        DISH CUPCAKE FOOD POPCORN
    """,
    "PARTY": """
        PARTY NAPKIN NAPKINS STRAW STRAWS DOILY DOILIES COCKTAIL WEDDING BIRTHDAY CONFETTI PICKS CANDY CASES
    """,
    "STATIONERY": """
        NOTEBOOK NOTEBOOKS JOURNAL PEN PENS PENCIL PENCILS RUBBER RUBBERS ERASER ERASERS SHARPENER RULER BOOK BOOKS
        PAD PADS SKETCHBOOK PAPERWEIGHT STAMP STAMPS CRAYONS CHALK CHALKS CALCULATOR STATIONERY ORGANISER ORGANIZER
        NOTELETS MEMO BOOKMARK DIARY
    """,
    "TABLEWARE": """
        MUG MUGS CUP CUPS SAUCER TEACUP TEAPOT TEA COFFEE BOWL BOWLS PLATE PLATES PLATTER TRAY TRAYS BEAKER BEAKERS
        GLASS TUMBLER GOBLET COASTER COASTERS PLACEMAT PLACEMATS PLACE DECANTER CHALICE TUMBLERS EGGCUP TANKARD FLUTE
        DOLLY
    """,
    "TEXTILES": """
        CUSHION CUSHIONS COVER THROW QUILT BLANKET PILLOW RUG FABRIC FELTCRAFT KNITTING SEWING KNITTED PATCHES OVEN
        WARMER SLIPPERS SLIPPER SOCKS PONCHO HAT KIT CRAFT BUTTONS THREAD HOT WATER
    """,
}
CATEGORY_OF = {word: category for category, words in CATEGORY_WORDS.items() for word in words.split()}


def find_category(description: str) -> str:
    words = re.findall(r"[A-Z][A-Z\-]*[A-Z]", description.upper())
    return next((CATEGORY_OF[word] for word in reversed(words) if word in CATEGORY_OF), "OTHER")


def make_tables() -> dict[str, pd.DataFrame]:
    """Return the tables of items and of users by file name."""
    log = pd.read_csv(HERE / "online_retail.csv.gz", dtype={"StockCode": str, "InvoiceNo": str, "CustomerID": str})
    sales = log[(log["Quantity"] > 0) & (log["UnitPrice"] > 0)]
    described = sales.dropna(subset=["Description"])
    described = described.assign(Description=described["Description"].str.split().str.join(" "))
    items = described.groupby("StockCode")["Description"].agg(lambda texts: texts.value_counts().sort_index().idxmax())
    items = items.rename("description").to_frame()
    items["price"] = sales.groupby("StockCode")["UnitPrice"].median().round(3)
    items["category"] = items["description"].map(find_category)
    # A customer's country is that of the first row, so that it does not depend on later rows (leakage).
    users = log.dropna(subset=["CustomerID"]).groupby("CustomerID")["Country"].first().rename("country")
    return {"items.csv.gz": items.reset_index(), "users.csv.gz": users.reset_index()}


def main() -> None:
    for name, table in make_tables().items():
        table.to_csv(HERE / name, index=False, compression={"method": "gzip", "mtime": 0})  # the same bytes at every run
        print(f"{name}: {len(table):,} rows")


if __name__ == "__main__":
    main()
