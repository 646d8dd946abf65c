"""Where a reader of the events is."""

from resources.metadata.database import Database
from resources.metadata.event_positions import move, position_of


def test_a_reader_begins_at_nothing_and_never_goes_back(database: Database) -> None:
    with database.write() as connection:
        assert position_of(connection, "kafka") == 0
        for seq, found in ((5, 5), (9, 9), (7, 9)):
            move(connection, "kafka", seq)
            assert position_of(connection, "kafka") == found
        assert position_of(connection, "other") == 0
