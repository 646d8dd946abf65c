"""Position of a reader of the events."""

from resources.metadata.database import Database
from resources.metadata.outbox import advance_position, read_position


def test_reader_position_begins_at_zero_and_never_decreases(database: Database) -> None:
    with database.write() as connection:
        assert read_position(connection, "kafka") == 0
        for seq, found in ((5, 5), (9, 9), (7, 9)):
            advance_position(connection, "kafka", seq)
            assert read_position(connection, "kafka") == found
        assert read_position(connection, "other") == 0
